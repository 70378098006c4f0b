// Barriers among some of a CTA's warps. They count warps: one whose lanes came apart would count
// more than once, and is brought together first.
#pragma once

#include <cstdint>

namespace b12x::ptx {

// Waits for kThreads threads, whole warps of them, to come to barrier kId.
template <int kId, int kThreads>
__device__ __forceinline__ void named_sync() {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Counts as one of them, without waiting.
template <int kId, int kThreads>
__device__ __forceinline__ void named_arrive() {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Waits likewise; true when all of them say so.
template <int kId, int kThreads>
__device__ __forceinline__ bool named_all(bool value) {
  uint32_t all;
  __syncwarp();
  asm volatile(
      "{\n\t"
      ".reg .pred mine, all;\n\t"
      "setp.ne.u32 mine, %1, 0;\n\t"
      "bar.red.and.pred all, %2, %3, mine;\n\t"
      "selp.u32 %0, 1, 0, all;\n\t"
      "}"
      : "=r"(all)
      : "r"(static_cast<uint32_t>(value)), "n"(kId), "n"(kThreads)
      : "memory");
  return all != 0;
}

}  // namespace b12x::ptx
