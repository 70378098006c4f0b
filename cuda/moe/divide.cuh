// Division of small numbers.
#pragma once

#include <cstdint>

namespace b12x {

// a / b for numbers below 2^24 (the launcher sees to that): a guess in floating point, put right.
__device__ __forceinline__ uint32_t divide(uint32_t a, uint32_t b) {
  uint32_t q = __float2uint_rz(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = static_cast<int>(a - q * b);
  if (rest < 0) --q;
  if (rest >= static_cast<int>(b)) ++q;
  return q;
}

}  // namespace b12x
