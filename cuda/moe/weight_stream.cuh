// The order in which a warp reads weights, and the ring that keeps its next tiles in flight.
#pragma once

#include <cstdint>

#include "cuda/formats/fp4_tile.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/work_list.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace b12x {

// a / b for numbers below 2^24 (the launcher sees to that): a guess in floating point, put right.
__device__ __forceinline__ uint32_t divide(uint32_t a, uint32_t b) {
  uint32_t q = __float2uint_rz(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = static_cast<int>(a - q * b);
  if (rest < 0) --q;
  if (rest >= static_cast<int>(b)) ++q;
  return q;
}

// A team's walk over units (major, minor): minor runs fastest, up to `limit`. A run of one or two
// neighbouring units goes to one team, the next run to the next team.
struct UnitWalk {
  int32_t major = 0, minor = 0, limit = 1, jump = 0, left = 0;

  // Takes the team's share of `units` units that begin at unit `first`.
  template <int kRun>
  __device__ __forceinline__ void start(uint32_t first, uint32_t units, uint32_t unit_limit,
                                        int log2_teams, int team) {
    const int runs = units / kRun;
    limit = unit_limit;
    jump = (kRun << log2_teams) - (kRun - 1);
    left = team < runs ? (((runs - 1 - team) >> log2_teams) + 1) * kRun : 0;
    const uint32_t unit = first + team * kRun;
    major = divide(unit, unit_limit);
    minor = unit - major * limit;
  }

  template <int kRun>
  __device__ __forceinline__ void next() {
    --left;
    if (kRun == 2 && (minor & 1) == 0) {
      ++minor;
      return;
    }
    minor += jump;
    while (minor >= limit) {
      minor -= limit;
      ++major;
    }
  }
};

// A warp's place in its team: which tiles of the reduction axis it takes.
struct TeamPlace {
  int32_t team, rank, first_tile;
  int32_t tiles;  // 0 when there is nothing for this warp

  static __device__ __forceinline__ TeamPlace of(int warp, const TeamShape& shape, int k_tiles) {
    TeamPlace place;
    place.team = warp >> shape.log2_split;
    place.rank = warp - (place.team << shape.log2_split);
    place.first_tile = place.rank * shape.slice;
    place.tiles = max(0, min(shape.slice, k_tiles - place.first_tile));
    return place;
  }
};

inline constexpr int kLog2Warps = 4;
static_assert(1 << kLog2Warps == kMoeDecodeWarps);

// Starts the walk over this CTA's contiguous share of `units` units.
template <int kRun>
__device__ __forceinline__ void start_share(UnitWalk& walk, uint32_t units, uint32_t limit,
                                            int log2_teams, int team) {
  const uint32_t runs = units / kRun;
  const uint32_t share = divide(runs, gridDim.x), rest = runs - share * gridDim.x;
  const uint32_t begin = blockIdx.x * share + min(blockIdx.x, rest);
  walk.start<kRun>(begin * kRun, (share + (blockIdx.x < rest)) * kRun, limit, log2_teams, team);
}

// The ring of one warp: its chunks of tiles of the first product, then of the second, `stages` of
// them in flight. Weights do not depend on activations, so the second product's chunks arrive while
// the first one's sums are still being exchanged. The warp is its own producer: one lane requests,
// all read.
class WeightRing {
 public:
  __device__ __forceinline__ WeightRing(uint32_t ring, uint32_t barriers, int stages)
      : ring_(ring), barriers_(barriers), policy_(ptx::evict_first_policy()), stages_(stages) {}

  // Sets up the barriers; run by the whole warp.
  __device__ __forceinline__ void init(int lane) {
    if (lane == 0) {
      for (int i = 0; i < stages_; ++i) ptx::mbarrier_init(barriers_ + 8 * i, 1);
    }
    ptx::fence_mbarrier_init();
    __syncwarp();
  }

  // Waits for the chunk at hand and returns where it is.
  __device__ __forceinline__ uint32_t wait() const {
    ptx::mbarrier_wait(barriers_ + 8 * stage_, parity_);
    return ring_ + stage_ * kChunkBytes;
  }

  // Starts the copy of `tiles` tiles into the stage at hand. The warp has read what was there.
  __device__ __forceinline__ void load(const uint8_t* source, int tiles, int lane) {
    if (lane == 0) {
      const uint32_t barrier = barriers_ + 8 * stage_;
      ptx::mbarrier_arrive_expect_bytes(barrier, tiles * kTileBytes);
      ptx::bulk_load(ring_ + stage_ * kChunkBytes, source, tiles * kTileBytes, barrier, policy_);
    }
  }

  __device__ __forceinline__ void advance() {
    if (++stage_ == stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  __device__ __forceinline__ void rewind() { stage_ = 0, parity_ = 0; }

 private:
  static constexpr int kChunkBytes = kChunkTiles * kTileBytes;
  uint32_t ring_, barriers_;
  uint64_t policy_;
  int stages_, stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace b12x
