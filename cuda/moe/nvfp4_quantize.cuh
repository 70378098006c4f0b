// NVFP4 quantization of activations, to the letter of the recipe (jax_b12x/moe/recipe.py): every
// step is one IEEE operation in fp32, so that all implementations agree bit for bit.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/ptx/max.cuh"

namespace b12x {

using ptx::max_or_nan;

// A global scale that cannot scale anything stands for zero.
__device__ __forceinline__ float usable_global_scale(float g) {
  return isfinite(g) && g > 0.0f ? g : 0.0f;
}

// The block scale, rounded to E4M3, of a block whose largest magnitude is `amax`; NaN stays NaN.
__device__ __forceinline__ float nvfp4_block_scale(float amax, float global_scale) {
  if (isnan(amax)) return amax;
  if (usable_global_scale(global_scale) == 0.0f) return 0.0f;
  const float exact = __fdiv_rn(__fdiv_rn(amax, 6.0f), global_scale);
  const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(exact, __NV_SATFINITE, __NV_E4M3);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// One block's scales, and what dividing by them takes.
struct Nvfp4Block {
  float scale, divisor, reciprocal;

  // Of a block whose largest magnitude is `amax`.
  static __device__ __forceinline__ Nvfp4Block of(float amax, float global_scale) {
    Nvfp4Block block{nvfp4_block_scale(amax, global_scale), 0.0f, 0.0f};
    block.divisor = __fmul_rn(block.scale, global_scale);
    block.reciprocal = __frcp_rn(block.divisor);
    return block;
  }

  // x / (scale * global_scale) rounded to E2M1 (ties to the even code), times the block scale: a
  // number that bf16 holds exactly.
  __device__ __forceinline__ float round(float x) const {
    // With a divisor in this range the quotient below is the correctly rounded one wherever it
    // decides about the code; NaN is not in it, nor is 0.
    if (!(divisor > 0x1p-60f && divisor < 0x1p60f)) return round_by_division(x, scale, divisor);
    float q = __fmul_rn(x, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, divisor, x), reciprocal, q);
    // Codes are multiples of 1/2 below 2, of 1 below 4 and of 2 from there on: adding 2^22, 2^23 or
    // 2^24 rounds to them, to even. What overflowed above is a NaN, which the minimum makes 6.
    const float magnitude = fminf(fabsf(q), 6.0f);
    const float step =
        __uint_as_float((__float_as_uint(fmaxf(magnitude, 1.0f)) & 0x7F800000u) + (22u << 23));
    const float code = __fsub_rn(__fadd_rn(magnitude, step), step);
    return __fmul_rn(copysignf(code, x), scale);
  }

 private:
  static __device__ __noinline__ float round_by_division(float x, float scale, float divisor) {
    if (isnan(scale)) return scale;
    if (scale == 0.0f) return 0.0f;
    const float q = __fdiv_rn(x, divisor);
    const float a = fabsf(q);
    float code = 0.0f;
    if (a > 0.25f) code = 0.5f;
    if (a >= 0.75f) code = 1.0f;
    if (a > 1.25f) code = 1.5f;
    if (a >= 1.75f) code = 2.0f;
    if (a > 2.5f) code = 3.0f;
    if (a >= 3.5f) code = 4.0f;
    if (a > 5.0f) code = 6.0f;
    return __fmul_rn(copysignf(code, q), scale);
  }
};

}  // namespace b12x
