// Copies and loads whose cache behaviour or ordering C++ cannot say.
#pragma once

#include <cstdint>

namespace b12x::ptx {

// This thread's place in its warp. The compiler keeps it: a special register is slow to read again.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Keeps the compiler from working a value out again where it is used, to save registers.
__device__ __forceinline__ void keep(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}

// An L2 policy for data that is read once: what is read again (routes, activations, code) stays.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Brings a line to L2, so that a later load does not queue behind everything that is requested
// meanwhile.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Starts a copy of `bytes` (a multiple of 16) contiguous bytes to shared memory; `barrier` counts
// them in.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// A load, from global or shared memory, that may not be moved before a barrier nor become a load of
// the read-only cache: for data that other CTAs of this launch, or the launch before it, have
// written.
__device__ __forceinline__ uint4 load_16(const void* address) {
  uint4 v;
  asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Starts a copy of 16 bytes to shared memory, or of zeros where `valid` is false: nothing is read
// there. The copying thread may read them after wait_for_copies(), others after a barrier too.
__device__ __forceinline__ void copy_16(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

// The same for weights that are read once; L2 fetches the 128 bytes around them, whose other half
// is wanted next.
__device__ __forceinline__ void copy_weights_16(uint32_t destination, const void* source,
                                                bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                   destination),
               "l"(source), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A load of weights that are read once, or zeros where `valid` is false: nothing is read there.
__device__ __forceinline__ uint4 load_weights_16(const void* address, bool valid, uint64_t policy) {
  uint4 v;
  asm volatile(
      "{\n\t"
      ".reg .pred valid;\n\t"
      "setp.ne.u32 valid, %5, 0;\n\t"
      "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
      "@valid ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;\n\t"
      "}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(valid)), "l"(policy));
  return v;
}

}  // namespace b12x::ptx
