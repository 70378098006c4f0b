// The stream of a CTA's weights: which tiles, in which order, and the ring that holds the next
// ones.
//
// A CTA takes its units (row tiles of touched experts) a step at a time, one unit a team, and each
// step chunk by chunk along the reduction axis, one tile a warp. The tiles of a chunk are one stage
// of the ring: its warp asks for stage after stage, and a stage's place is used again when all
// warps have let go of it. Weights do not depend on activations: the second product's are on their
// way while the first one's sums are still being exchanged.
#pragma once

#include <cstdint>

#include "cuda/formats/fp4_tile.cuh"
#include "cuda/moe/divide.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/work_list.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace b12x {

static_assert(kTileBytes == kMoeTileBytes);

// The units of one CTA in one product: `units` of them from unit (major, minor) on. `limit` minors
// make a major. In the first product, and in the second one of Fc2Order::kExpert, a unit is (item,
// row tile); in the second one of Fc2Order::kOwner it is (owned row tile, item). Runs of one or two
// neighbouring units go to one team.
struct UnitShare {
  int32_t major, minor, units, run;
  Divisor limit;

  // This CTA's contiguous share of `all` units, in whole runs.
  static __device__ __forceinline__ UnitShare of_grid(uint32_t all, const Divisor& limit,
                                                      uint32_t run, const Divisor& grid) {
    const uint32_t runs = all / run;
    const uint32_t share = divide(runs, grid), rest = runs - share * grid.by;
    const uint32_t begin = (blockIdx.x * share + min(blockIdx.x, rest)) * run;
    const uint32_t major = divide(begin, limit);
    return {static_cast<int32_t>(major), static_cast<int32_t>(begin - major * limit.by),
            static_cast<int32_t>((share + (blockIdx.x < rest)) * run), static_cast<int32_t>(run),
            limit};
  }

  // How many of them go to one of several walkers.
  __device__ __forceinline__ int units_of(const Divisor& walkers, int walker) const {
    const int runs = units / run;
    return walker < runs ? (divide(runs - 1 - walker, walkers) + 1) * run : 0;
  }
};

// Where the run is that begins with a walker's unit number `count`, without a walk.
struct UnitRun {
  int32_t major, minor;

  static __device__ __forceinline__ UnitRun of(const UnitShare& share, int walkers, int walker,
                                               int count) {
    const uint32_t minor = share.minor + count * walkers + walker * share.run;
    const uint32_t carry = divide(minor, share.limit);
    return {static_cast<int32_t>(share.major + carry),
            static_cast<int32_t>(minor - carry * share.limit.by)};
  }

  // How many of the walker's runs, from this one on, have this major.
  __device__ __forceinline__ int runs_of_major(const UnitShare& share,
                                               const Divisor& walkers) const {
    return divide((share.limit.by - 1 - minor) / share.run, walkers) + 1;
  }
};

// A walk over the units of a share, for one of several walkers: one run after another goes to one
// walker after another.
struct UnitWalk {
  int32_t major, minor;
  int32_t index;  // of the unit in the share; the walk is over when it reaches share.units
  int32_t limit, jump, run;

  static __device__ __forceinline__ UnitWalk of(const UnitShare& share, int walkers, int walker) {
    if (share.units == 0) return {0, 0, 0, 1, 1, 1};
    UnitWalk walk{share.major,
                  share.minor + walker * share.run,
                  walker * share.run,
                  static_cast<int32_t>(share.limit.by),
                  (walkers - 1) * share.run + 1,
                  share.run};
    walk.carry();
    return walk;
  }

  // Whether the next unit is of another run.
  __device__ __forceinline__ bool ends_run() const { return run == 1 || (index & 1) != 0; }

  __device__ __forceinline__ void next() {
    const int step = ends_run() ? jump : 1;
    minor += step;
    index += step;
    carry();
  }

 private:
  __device__ __forceinline__ void carry() {
#pragma unroll 1
    while (minor >= limit) {
      minor -= limit;
      ++major;
    }
  }
};

// The ring. Every warp, and the one that requests, goes through all stages in order.
class WeightRing {
 public:
  __device__ __forceinline__ WeightRing(uint32_t ring, uint32_t bytes)
      : begin_(ring), end_(ring + bytes), stage_(ring) {}

  // Sets up the barriers; run by one warp.
  __device__ __forceinline__ void init(int lane) const {
    const uint32_t stage = begin_ + lane * kMoeStageBytes;
    if (stage < end_) {
      ptx::mbarrier_init(stage + kFull, 1);
      ptx::mbarrier_init(stage + kEmpty, kMoeDecodeWarps * kMoeLanesAtBarriers);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Waits for the stage at hand, and says where it is.
  __device__ __forceinline__ uint32_t wait() const {
    ptx::mbarrier_wait(stage_ + kFull, parity_);
    return stage_;
  }

  // Lets go of the stage at hand and turns to the next one; run by a whole warp, whose reads the
  // barrier keeps before itself.
  __device__ __forceinline__ void release(int lane) {
    __syncwarp();
    if (kMoeLanesAtBarriers > 1 || lane == 0) ptx::mbarrier_arrive(stage_ + kEmpty);
    advance();
  }

  // Waits for room and announces `bytes`; run by one thread.
  __device__ __forceinline__ void open(uint32_t bytes) const {
    wait_for_room();
    ptx::mbarrier_arrive_expect_bytes(stage_ + kFull, bytes);
  }
  __device__ __forceinline__ void wait_for_room() const {
    ptx::mbarrier_wait(stage_ + kEmpty, parity_ ^ 1);
  }

  // Requests part of the stage at hand.
  __device__ __forceinline__ void request(uint32_t offset, const uint8_t* source, uint32_t bytes,
                                          uint64_t policy) const {
    ptx::bulk_load(stage_ + offset, source, bytes, stage_ + kFull, policy);
  }

  __device__ __forceinline__ void advance() {
    stage_ += kMoeStageBytes;
    if (stage_ == end_) {
      stage_ = begin_;
      parity_ ^= 1;
    }
  }

 private:
  static constexpr uint32_t kFull = kMoeStageTileBytes, kEmpty = kFull + 8;

  const uint32_t begin_, end_;
  uint32_t stage_;
  uint32_t parity_ = 0;
};

// The weights of a step, by one warp: a lane for each team, and its unit chunk by chunk.
struct UnitRequest {
  const uint8_t* source;  // what comes next of this lane's unit, if it has one
  uint32_t teams;         // how many have one
  int left;               // tiles of each

  // `split`: how many tiles of a unit are a chunk.
  __device__ __forceinline__ void chunk(WeightRing& ring, int split, int lane, uint64_t policy) {
    const uint32_t bytes = min(left, split) * kTileBytes;
    if (lane == 0) {
      ring.open(teams * bytes);
    } else if (kMoeLanesAtBarriers > 1) {
      ring.wait_for_room();
    }
    __syncwarp();
    if (source != nullptr) {
      ring.request(lane * split * kTileBytes, source, bytes, policy);
      source += bytes;
    }
    ring.advance();
    left -= split;
  }
  __device__ __forceinline__ void all_chunks(WeightRing& ring, int split, int lane,
                                             uint64_t policy) {
#pragma unroll 1
    while (left > 0) chunk(ring, split, lane, policy);
  }
};

}  // namespace b12x
