// Partial sums on their way from the warps that multiply to the warps that finish.
#pragma once

#include <cstdint>

#include "cuda/moe/params.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace b12x {

// For each team, the partial sums of its last few units: a warp's sums are 16 rows x 8 tokens, 512
// bytes. Nobody who multiplies waits for a sum to be finished, only for room.
class TeamSums {
 public:
  // Of one of the two products.
  __device__ __forceinline__ TeamSums(uint32_t memory, int product)
      : begin_(memory), barriers_(memory + kMoeReducePartBytes + (product - 1) * kBarrierBytes) {}

  // Sets up a team's barriers; run by one thread.
  __device__ __forceinline__ void init(const TeamShape& shape, int team) const {
#pragma unroll 1
    for (int stage = 0; stage < kMoeReduceStages; ++stage) {
      const uint32_t full = full_barrier(stage, team);
      ptx::mbarrier_init(full, shape.size * kMoeLanesAtBarriers);
      ptx::mbarrier_init(full + kEmpty, kMoeLanesAtBarriers);
    }
  }

  // The sum of a team's unit, in the order of the reduction axis. Run by a whole warp.
  __device__ __forceinline__ void take(float (&acc)[4], const TeamShape& shape, int team,
                                       uint32_t count, int lane) const {
    const uint32_t stage = count % kMoeReduceStages;
    const uint32_t full = full_barrier(stage, team);
    ptx::mbarrier_wait(full, count / kMoeReduceStages & 1);
    uint32_t from = begin_ + stage * kMoeReduceBytes + team * shape.split * 512 + lane * 16;
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    int left = shape.size;
#pragma unroll 1
    for (; left >= 4; left -= 4, from += 4 * 512) add_parts<4>(acc, from);
    if (left >= 2) {
      add_parts<2>(acc, from);
      from += 2 * 512;
    }
    if ((left & 1) != 0) add_parts<1>(acc, from);
    __syncwarp();
    if (kMoeLanesAtBarriers > 1 || lane == 0) ptx::mbarrier_arrive(full + kEmpty);
  }

 private:
  friend class TeamSumWriter;
  static constexpr uint32_t kEmpty = 8;
  static constexpr int kBarrierBytes = kMoeDecodeWarps * 16;

  __device__ __forceinline__ uint32_t full_barrier(uint32_t stage, int team) const {
    return barriers_ + stage * kMoeReduceBytes + team * 16;
  }

  // Adds the sums of kWarps warps, all of them in flight at a time.
  template <int kWarps>
  static __device__ __forceinline__ void add_parts(float (&acc)[4], uint32_t from) {
    uint4 part[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) part[i] = ptx::load_shared_16(from + i * 512);
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      acc[0] = __fadd_rn(acc[0], __uint_as_float(part[i].x));
      acc[1] = __fadd_rn(acc[1], __uint_as_float(part[i].y));
      acc[2] = __fadd_rn(acc[2], __uint_as_float(part[i].z));
      acc[3] = __fadd_rn(acc[3], __uint_as_float(part[i].w));
    }
  }

  uint32_t begin_, barriers_;
};

// Hands on a warp's sums, one unit of its team after another.
class TeamSumWriter {
 public:
  __device__ __forceinline__ TeamSumWriter(const TeamSums& sums, int team, int warp, int lane)
      : barrier_(sums.barriers_ - sums.begin_ + team * 16),
        slot_(warp * 512 + lane * 16),
        stage_(sums.begin_),
        end_(sums.begin_ + kMoeReduceStages * kMoeReduceBytes) {}

  // Run by a whole warp.
  __device__ __forceinline__ void put(const float (&acc)[4], int lane) {
    const uint32_t full = stage_ + barrier_;
    ptx::mbarrier_wait(full + TeamSums::kEmpty, parity_);
    ptx::store_shared_16(stage_ + slot_, {__float_as_uint(acc[0]), __float_as_uint(acc[1]),
                                          __float_as_uint(acc[2]), __float_as_uint(acc[3])});
    __syncwarp();
    if (kMoeLanesAtBarriers > 1 || lane == 0) ptx::mbarrier_arrive(full);
    stage_ += kMoeReduceBytes;
    if (stage_ == end_) {
      stage_ -= kMoeReduceStages * kMoeReduceBytes;
      parity_ ^= 1;
    }
  }

 private:
  uint32_t barrier_, slot_;  // offsets in a stage
  uint32_t stage_, end_;
  uint32_t parity_ = 1;
};

}  // namespace b12x
