// NVFP4 quantization of activations, to the letter of the recipe (jax_b12x/moe/recipe.py): every
// step is one IEEE operation in fp32, so that all implementations agree bit for bit.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace b12x {

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

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

// x / (scale * global_scale) rounded to E2M1 (ties to the even code), times the block scale: a
// number that bf16 holds exactly.
__device__ __forceinline__ float nvfp4_round(float x, float scale, float global_scale) {
  if (isnan(scale)) return scale;
  if (scale == 0.0f) return 0.0f;
  const float q = __fdiv_rn(x, __fmul_rn(scale, global_scale));
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

}  // namespace b12x
