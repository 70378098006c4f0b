// 16-bit floats to fp32 and back, and the gated activation in fp32. Each operation is rounded once,
// so that every kernel gives the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/moe/activation.h"

namespace b12x {

__device__ __forceinline__ float to_float(uint16_t bits, bool fp16) {
  return fp16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
}

__device__ __forceinline__ uint16_t from_float(float v, bool fp16) {
  return fp16 ? __half_as_ushort(__float2half_rn(v)) : __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

__device__ __forceinline__ float sigmoid(float v) {
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-v)));
}

__device__ __forceinline__ float activate(Activation activation, float alpha, float limit,
                                          float gate, float up) {
  if (activation == Activation::kSilu) {
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
  }
  // Comparisons that a NaN fails leave it as it is.
  if (gate > limit) gate = limit;
  if (up > limit) up = limit;
  if (up < -limit) up = -limit;
  return __fmul_rn(__fmul_rn(__fadd_rn(up, 1.0f), gate), sigmoid(__fmul_rn(alpha, gate)));
}

}  // namespace b12x
