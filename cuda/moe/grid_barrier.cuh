// A barrier across the grid of one launch, over one persistent word.
//
// The word is zeroed once, when its owner binds it, and never reset: each barrier adds 2^16 to it
// in all (the first CTA adds what the others leave over), so that the count above the low 16 bits
// is the number of barriers that have ended, in eager runs, captures and replays alike, whatever
// their grids. No two launches over the same word may run at the same time.
//
// A wait is bounded. A CTA whose time is up sets the word's top bit, and does so only while the
// barrier is still open: either every CTA passes or every CTA sees the failure. The bit stays until
// the owner zeroes the word, so that later launches fail as well instead of trusting a grid that
// was not resident. CTAs that arrive after a failure still count, and leave at once.
#pragma once

#include <cstdint>

#include "cuda/moe/params.h"
#include "cuda/ptx/grid_word.cuh"

namespace b12x {

inline constexpr uint64_t kGridBarrierFailed = uint64_t{1} << 63;
inline constexpr int kGridBarrierArrivalBits = 16;
static_assert(kMoeMaxGrid < 1 << kGridBarrierArrivalBits);

class GridBarrier {
 public:
  // Run by one thread of the CTA, the one that will arrive and wait, before it first arrives.
  __device__ __forceinline__ void begin(const GridBarrierParams& params) {
    word_ = params.word;
    fault_ = params.fault;
    timeout_ns_ = params.timeout_ns;
    // This CTA has not arrived, so no barrier of this launch can have ended yet.
    ended_ = barriers_ended(ptx::load_relaxed(word_));
  }

  // Announces that this CTA is here. What its threads wrote before a barrier among them is visible
  // to whoever sees wait() return true.
  __device__ __forceinline__ void arrive() {
    const uint64_t all = uint64_t{1} << kGridBarrierArrivalBits;
    const uint64_t share = blockIdx.x == 0 ? all - (gridDim.x - 1) : 1;
    ptx::add_release(word_, share);
  }

  // Waits for the others; false when the barrier has failed. A barrier among the CTA's threads has
  // to follow.
  __device__ __forceinline__ bool wait() {
    ++ended_;
    uint64_t seen = ptx::load_acquire(word_);
    if (passed(seen)) return (seen & kGridBarrierFailed) == 0;
    const uint64_t begin = ptx::global_nanoseconds();
    for (;;) {
#pragma unroll 1
      for (int i = 0; i < kPollsBetweenClocks; ++i) {
        seen = ptx::load_acquire(word_);
        if (passed(seen)) return (seen & kGridBarrierFailed) == 0;
      }
      if (ptx::global_nanoseconds() - begin > timeout_ns_) fail(seen);
    }
  }

 private:
  static constexpr int kPollsBetweenClocks = 64;

  static __device__ __forceinline__ uint64_t barriers_ended(uint64_t word) {
    return (word & ~kGridBarrierFailed) >> kGridBarrierArrivalBits;
  }
  __device__ __forceinline__ bool passed(uint64_t word) const {
    return (word & kGridBarrierFailed) != 0 || barriers_ended(word) >= ended_;
  }
  // Sets the failure bit unless the word has changed since it was `seen`.
  __device__ __forceinline__ void fail(uint64_t seen) {
    const uint64_t before = ptx::compare_and_swap(word_, seen, seen | kGridBarrierFailed);
    if (before == seen && fault_ != nullptr) ptx::store_for_host(fault_, 1);
  }

  uint64_t* word_ = nullptr;
  uint32_t* fault_ = nullptr;
  uint64_t timeout_ns_ = 0, ended_ = 0;
};

}  // namespace b12x
