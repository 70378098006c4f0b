// Maxima that keep a NaN.
#pragma once

namespace b12x::ptx {

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

}  // namespace b12x::ptx
