// Data that is its own flag: floats that other CTAs of the same launch write.
//
// Memory is filled with a pattern that no float is written as. Who reads a number has it as soon as
// it is written: there is no flag to set after the data, and nothing to wait for before reading it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace b12x::ptx {

// As 16-bit floats, NaNs that conversions from fp32 do not give; as fp32, one that no operation
// gives.
inline constexpr uint32_t kUnwritten = 0xFFFFFFFFu;

// Threads with numbers from 0 to `step` mark `units` of 16 bytes.
__device__ __forceinline__ void mark_unwritten(void* memory, int units, int thread, int step) {
#pragma unroll 4
  for (int i = thread; i < units; i += step) {
    static_cast<uint4*>(memory)[i] = {kUnwritten, kUnwritten, kUnwritten, kUnwritten};
  }
}

// The larger of each half, over all words so far.
__device__ __forceinline__ uint32_t most_of(uint32_t most, uint4 v) {
  return __vimax3_u16x2(__vimax3_u16x2(most, v.x, v.y), v.z, v.w);
}
__device__ __forceinline__ bool has_unwritten_half(uint32_t most) {
  return (most & 0xFFFF) == 0xFFFF || most >> 16 == 0xFFFF;
}

// The largest word so far: kUnwritten where an fp32 number is not written.
__device__ __forceinline__ uint32_t most_of_words(uint32_t most, uint4 v) {
  return max(max(max(most, v.x), max(v.y, v.z)), v.w);
}

// 16 bytes of them, written or not: never from a cache of this SM.
__device__ __forceinline__ uint4 load_16_as_it_is(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

}  // namespace b12x::ptx
