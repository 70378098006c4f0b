// A word that all CTAs of a grid, and launches after one another, share.
#pragma once

#include <cstdint>

namespace b12x::ptx {

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}

__device__ __forceinline__ void add_release(uint64_t* word, uint64_t value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Writes `value` if the word is `expected`; returns what it was.
__device__ __forceinline__ uint64_t compare_and_swap(uint64_t* word, uint64_t expected,
                                                     uint64_t value) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(word), "l"(expected), "l"(value)
               : "memory");
  return before;
}

// A word that the host may look at.
__device__ __forceinline__ void store_for_host(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

}  // namespace b12x::ptx
