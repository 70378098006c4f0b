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
  static constexpr int kBarrierBytes = 2 * kMoeDecodeWarps * kMoeReduceStages * 8;

  __device__ __forceinline__ TeamSums(uint32_t buffers, uint32_t barriers)
      : buffers_(buffers), barriers_(barriers) {}

  // Sets up a team's barriers; run by one thread.
  __device__ __forceinline__ void init(const TeamShape& shape, int team) const {
#pragma unroll 1
    for (int stage = 0; stage < kMoeReduceStages; ++stage) {
      ptx::mbarrier_init(full(team, stage), shape.size * kMoeLanesAtBarriers);
      ptx::mbarrier_init(full(team, stage) + kBarrierBytes / 2, kMoeLanesAtBarriers);
    }
  }

  // Where a lane puts its part of a warp's sums.
  __device__ __forceinline__ uint32_t slot(int warp, int lane) const {
    return buffer(0, warp, lane);
  }

  // Hands on the part that a lane's slot is for, of its team's unit number `count`.
  __device__ __forceinline__ void put(const float (&acc)[4], int team, uint32_t count,
                                      uint32_t slot, int lane) const {
    const uint32_t stage = count % kMoeReduceStages;
    ptx::mbarrier_wait(full(team, stage) + kBarrierBytes / 2, (count / kMoeReduceStages & 1) ^ 1);
    ptx::store_shared_16(slot + stage * kStageBytes,
                         {__float_as_uint(acc[0]), __float_as_uint(acc[1]), __float_as_uint(acc[2]),
                          __float_as_uint(acc[3])});
    __syncwarp();
    if (kMoeLanesAtBarriers > 1 || lane == 0) ptx::mbarrier_arrive(full(team, stage));
  }

  // The sum of a team's unit, in the order of the reduction axis. Run by a whole warp.
  __device__ __forceinline__ void take(float (&acc)[4], const TeamShape& shape, int team,
                                       uint32_t count, int lane) const {
    const uint32_t stage = count % kMoeReduceStages;
    ptx::mbarrier_wait(full(team, stage), count / kMoeReduceStages & 1);
    uint32_t from = buffer(stage, team * shape.split, lane);
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
#pragma unroll 1
    for (int r = 0; r < shape.size; r += 4) {
      uint4 part[4];  // in flight at a time
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (r + i < shape.size) part[i] = ptx::load_shared_16(from + (r + i) * 512);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (r + i >= shape.size) break;
        acc[0] = __fadd_rn(acc[0], __uint_as_float(part[i].x));
        acc[1] = __fadd_rn(acc[1], __uint_as_float(part[i].y));
        acc[2] = __fadd_rn(acc[2], __uint_as_float(part[i].z));
        acc[3] = __fadd_rn(acc[3], __uint_as_float(part[i].w));
      }
    }
    __syncwarp();
    if (kMoeLanesAtBarriers > 1 || lane == 0)
      ptx::mbarrier_arrive(full(team, stage) + kBarrierBytes / 2);
  }

 private:
  static constexpr int kStageBytes = kMoeDecodeWarps * 512;

  __device__ __forceinline__ uint32_t full(int team, uint32_t stage) const {
    return barriers_ + (team * kMoeReduceStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t buffer(uint32_t stage, int warp, int lane) const {
    return buffers_ + stage * kStageBytes + warp * 512 + lane * 16;
  }

  uint32_t buffers_, barriers_;
};

}  // namespace b12x
