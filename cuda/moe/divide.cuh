// Division of small numbers.
#pragma once

#include <cstdint>

#include "cuda/moe/params.h"

namespace b12x {

// a / b for numbers below 2^24 (the launcher sees to that): a guess in floating point, put right.
__device__ __forceinline__ uint32_t divide(uint32_t a, uint32_t b) {
  uint32_t q = __float2uint_rz(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = static_cast<int>(a - q * b);
  if (rest < 0) --q;
  if (rest >= static_cast<int>(b)) ++q;
  return q;
}

// The same by a number whose reciprocal is known: a multiplication, which is at most one short.
__device__ __forceinline__ uint32_t divide(uint32_t a, const Divisor& d) {
  const uint32_t q = __umulhi(a, d.reciprocal);
  return a - q * d.by >= d.by ? q + 1 : q;
}

// Of a number that only the device knows, for quotients below 2^19: its reciprocal is too small by
// less than 2^-19 of it.
__device__ __forceinline__ Divisor divisor_of(uint32_t by) {
  const uint32_t r = __float2uint_rz(__fdividef(4294967040.0f, static_cast<float>(by)));
  return {by, r - (r >> 20) - 1};
}

}  // namespace b12x
