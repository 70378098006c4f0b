// The functions of cuda/ptx that the MoE kernels use, on a CPU. The test puts this in the place of
// those headers.
#pragma once

#include "tests/moe_simt/cuda.h"

namespace b12x::ptx {

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - simt::DynamicShared()) +
         simt::kSharedBegin;
}
inline simt::Barrier& barrier_at(uint32_t address) {
  auto& barriers = simt::ThisBlock().barriers;
  const auto found = barriers.find(address);
  if (found == barriers.end()) simt::Fail("a barrier that was not set up");
  return found->second;
}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  simt::ThisBlock().barriers[barrier] = {count, count, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_bytes(uint32_t address, uint32_t bytes) {
  simt::Barrier& barrier = barrier_at(address);
  barrier.bytes += bytes;
  if (--barrier.pending < 0) simt::Fail("more arrivals than a barrier waits for");
  barrier.EndPhaseIfComplete();
}
inline void mbarrier_arrive(uint32_t address) { mbarrier_arrive_expect_bytes(address, 0); }
inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  // As the hardware has it: the last phase that ended is all that a barrier remembers.
  while ((barrier_at(address).phase & 1) == parity) simt::Yield();
}

inline int lane() { return simt::Here().thread % simt::kWarp; }
inline void keep(uint4&) {}
inline uint64_t evict_first_policy() { return 0; }
inline void prefetch_to_l2(const void*) {}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  simt::StartCopy(to, from, bytes, barrier);
}
inline uint4 load_shared_16(uint32_t address) {
  uint4 v;
  std::memcpy(&v, simt::Shared(address, sizeof(v)), sizeof(v));
  return v;
}
inline uint32_t load_shared_4(uint32_t address) {
  uint32_t v;
  std::memcpy(&v, simt::Shared(address, sizeof(v)), sizeof(v));
  return v;
}
inline uint2 load_shared_8(uint32_t address) {
  uint2 v;
  std::memcpy(&v, simt::Shared(address, sizeof(v)), sizeof(v));
  return v;
}
inline void store_shared_16(uint32_t address, uint4 v) {
  std::memcpy(simt::Shared(address, sizeof(v)), &v, sizeof(v));
}
inline uint4 load_16(const void* address) {
  uint4 v;
  std::memcpy(&v, address, sizeof(v));
  return v;
}
inline constexpr uint32_t kUnwritten = 0xFFFFFFFFu;
inline void mark_unwritten(void* memory, int units, int thread, int step) {
  for (int i = thread; i < units; i += step) {
    static_cast<uint4*>(memory)[i] = {kUnwritten, kUnwritten, kUnwritten, kUnwritten};
  }
}
inline uint32_t most_of_words(uint32_t most, uint4 v) {
  return std::max({most, v.x, v.y, v.z, v.w});
}
inline uint32_t most_of(uint32_t most, uint4 v) {
  for (uint32_t word : {v.x, v.y, v.z, v.w}) {
    most = std::max(most & 0xFFFF0000, word & 0xFFFF0000) | std::max(most & 0xFFFF, word & 0xFFFF);
  }
  return most;
}
inline bool has_unwritten_half(uint32_t most) {
  return (most & 0xFFFF) == 0xFFFF || most >> 16 == 0xFFFF;
}
inline uint4 load_16_as_it_is(const void* address) {
  simt::Yield();
  return load_16(address);
}
inline float max_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? std::nanf("") : std::max(a, b);
}
inline void launch_dependents() {}
inline void wait_for_prior_kernel() {}

template <int kId, int kThreads>
bool named_all(bool value) {
  simt::NamedBarrier& barrier = simt::ThisBlock().named[kId];
  const unsigned generation = barrier.generation;
  barrier.all = barrier.all && value;
  if (++barrier.arrived == kThreads) {
    barrier.result[generation % 2] = barrier.all;
    barrier.all = true;
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) simt::Yield();
  return barrier.result[generation % 2];
}
template <int kId, int kThreads>
void named_sync() {
  named_all<kId, kThreads>(true);
}
template <int kId, int kThreads>
void named_arrive() {
  simt::NamedBarrier& barrier = simt::ThisBlock().named[kId];
  if (++barrier.arrived < kThreads) return;
  barrier.result[barrier.generation % 2] = barrier.all;
  barrier.all = true;
  barrier.arrived = 0;
  ++barrier.generation;
}

inline uint64_t load_relaxed(const uint64_t* word) {
  simt::Yield();
  return *word;
}
inline uint64_t load_acquire(const uint64_t* word) { return load_relaxed(word); }
inline void add_release(uint64_t* word, uint64_t value) { *word += value; }
inline uint64_t compare_and_swap(uint64_t* word, uint64_t expected, uint64_t value) {
  const uint64_t before = *word;
  if (before == expected) *word = value;
  return before;
}
inline void store_for_host(uint32_t* word, uint32_t value) { *word = value; }
inline uint64_t global_nanoseconds() { return static_cast<uint64_t>(simt::Now()); }

template <bool kFp16>
float number(uint32_t bits) {
  return kFp16 ? host::F16::Widen(static_cast<uint16_t>(bits))
               : host::BF16::Widen(static_cast<uint16_t>(bits));
}
template <bool kFp16>
uint32_t rounded(float v) {
  return kFp16 ? host::F16::Round(v) : host::BF16::Round(v);
}
template <bool kFp16>
void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const Operands mine{{a0, a1, a2, a3}, {b0, b1}};
  const unsigned char* lanes = simt::Exchange(&mine, sizeof(mine));
  Operands all[simt::kWarp];
  for (int i = 0; i < simt::kWarp; ++i) {
    std::memcpy(&all[i], lanes + i * simt::kLaneBytes, sizeof(mine));
  }
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = all[4 * g + k % 8 / 2].a[i / 2 + 2 * (k / 8)];
      const uint32_t b = all[4 * (2 * t + i % 2) + k % 8 / 2].b[k / 8];
      d[i] += number<kFp16>(a >> 16 * (k % 2)) * number<kFp16>(b >> 16 * (k % 2));
    }
  }
}
template <bool kFp16>
uint32_t mul_x2(uint32_t a, uint32_t b) {
  return rounded<kFp16>(number<kFp16>(a) * number<kFp16>(b)) |
         rounded<kFp16>(number<kFp16>(a >> 16) * number<kFp16>(b >> 16)) << 16;
}
template <bool kFp16, int kHalf>
uint32_t mul_x2_by_half(uint32_t a, uint32_t b) {
  const uint32_t half = b >> 16 * kHalf & 0xFFFF;
  return mul_x2<kFp16>(a, half | half << 16);
}
template <bool kFp16>
float half_as_float(uint32_t pair, int high) {
  return number<kFp16>(high != 0 ? pair >> 16 : pair & 0xFFFF);
}
inline uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  return (mask & a) | (~mask & b);
}

}  // namespace b12x::ptx
