// MoE decode on Hopper: both products of the touched experts at the speed of reading their weights
// once.
//
// Weights are the MMA's A operand (16 rows), up to 8 tokens its N side. One warp of a CTA requests
// the CTA's weights, which are one stream (weight_stream.cuh); 16 warps multiply. The warps of a
// team share a row tile along the reduction axis: each keeps its columns of an expert's activations
// in registers for as many row tiles as come, and the team adds up at the end of each. The parts
// below are shared by the fused kernel and the split ones, so that all give the same bits.
#pragma once

#include <cstdint>

#include "cuda/formats/fp4_tile.cuh"
#include "cuda/moe/decode_output.cuh"
#include "cuda/moe/decode_recipe.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/quantize_input.cuh"
#include "cuda/moe/team_sum.cuh"
#include "cuda/moe/unit_output.cuh"
#include "cuda/moe/weight_stream.cuh"
#include "cuda/moe/work_list.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/self_flag.cuh"

namespace b12x {

// Which products a launch computes.
enum class DecodePart { kBoth, kFc1, kFc2 };

template <typename Recipe, DecodePart kPart>
class MoeDecode : public DecodeOutput<Recipe> {
 protected:
  using Base = DecodeOutput<Recipe>;
  using Base::lane;
  using Base::memory;
  using Base::owner;
  using Base::p;
  using Base::tables;
  using typename Base::Math;

 public:
  static constexpr bool kHasFc1 = kPart != DecodePart::kFc2;
  static constexpr bool kHasFc2 = kPart != DecodePart::kFc1;
  static constexpr int kFc1Run = IntermediateOutput<Recipe>::kRun;

  __device__ __forceinline__ MoeDecode(const MoeDecodeParams& params, char* shared)
      : Base(params, shared),
        warp(threadIdx.x >> 5),
        base(ptx::smem_address(shared)),
        ring(base + p.plan.shared.ring, p.plan.ring_bytes) {}

  // What the warps have to know of a product.
  struct Product {
    const TeamShape& shape;
    int row_tiles, k_tiles;
    UnitShare share;
  };
  template <int kProduct>
  __device__ __forceinline__ Product view_of() const {
    return view_of<kProduct>(items());
  }
  template <int kProduct>
  __device__ __forceinline__ Product view_of(int items) const {
    const MoeDecodeShape& shape = p.plan.shape;
    const int row_tiles = kProduct == 1 ? shape.fc1_row_tiles : shape.fc2_row_tiles;
    const int run = kProduct == 1 ? kFc1Run : 1;
    const Divisor& by_row_tiles = kProduct == 1 ? p.plan.by_fc1_row_tiles : p.plan.by_fc2_row_tiles;
    const UnitShare share =
        kProduct == 2 && owner
            ? UnitShare{0, 0, this->owned_tiles() * items, 1, divisor_of(items)}
            : UnitShare::of_grid(items * row_tiles, by_row_tiles, run, p.plan.by_grid);
    return {kProduct == 1 ? p.plan.fc1 : p.plan.fc2, row_tiles,
            kProduct == 1 ? shape.fc1_k_tiles : shape.fc2_k_tiles, share};
  }

  // Warps have roles; a role's steps are to be run by its warps alone.
  __device__ __forceinline__ bool is_multiplier() const { return warp < kMoeDecodeWarps; }
  __device__ __forceinline__ bool is_requester() const { return warp == kRequester; }

  // The requester: lists a single token's work, and asks for all weights.
  __device__ __forceinline__ void request() {
    // Nothing else stands between a single token's routes and the first weights.
    const bool one_token = p.num_tokens == 1;
    int id = -1;
    if (one_token && lane < p.top_k) id = p.topk_ids[lane];
    ring.init(lane);
    const uint64_t policy = ptx::evict_first_policy();
    if (kHasFc1 && kHasFc2) {
      // The rows of y that other CTAs read are marked as h is, by the warp that has nothing else to
      // do yet.
      if (!owner) {
        ptx::mark_unwritten(p.y, p.num_tokens * p.top_k * p.plan.shape.fc2_row_tiles * 4,
                            blockIdx.x * 32 + lane, gridDim.x * 32);
      }
      pass_sync_marked();
    }
    if (one_token) {
      list_one_token(p, tables(), lane, id);
      __syncwarp();
      pass_sync_all();
    } else {
      sync_all();
    }
    if constexpr (kHasFc1) request_units<1>(view_of<1>(), policy);
    if constexpr (kHasFc2) request_units<2>(view_of<2>(), policy);
  }

  // The multipliers: list the work.
  __device__ __forceinline__ void begin_multiplying() {
    if (lane == 0) {
      if (kHasFc1 && warp < p.plan.fc1.teams) sums(1).init(p.plan.fc1, warp);
      if (kHasFc2 && warp < p.plan.fc2.teams) sums(2).init(p.plan.fc2, warp);
    }
    if constexpr (Recipe::kQuantized && kHasFc1) {
      // A single token's work is listed meanwhile.
      if (p.plan.input_in_shared) quantize_input_for_this_cta(p, base + p.plan.shared.input);
    }
    if (p.num_tokens > 1) {
      list_many_tokens(p, tables(), [] { sync_all(); });
      sync_multipliers();
    } else {
      sync_all();
    }
  }

  // Product 1 is h = activation(x * w13), 2 is y = h * w2, for every row. In one launch with the
  // first, the second one waits for this CTA's part of h, and reads the others' as it is written.
  template <int kProduct>
  __device__ __forceinline__ void multiply(const Product& it) {
    // Few chunks of activations stay in registers; more come anew for each unit.
    switch (it.shape.chunks) {
      case 1:
        return multiply_units<kProduct, 1>(it);
      case 2:
        return multiply_units<kProduct, 2>(it);
      case 3:
        return multiply_units<kProduct, 3>(it);
      default:
        return multiply_units<kProduct, 0>(it);
    }
  }

  // The finishers: mark h as not written, this CTA's share of it. The others must know before they
  // write or read any.
  __device__ __forceinline__ void mark_intermediate() {
    constexpr int kThreads = 32 * kMoeFinishWarps;
    ptx::mark_unwritten(p.h, p.num_tokens * p.top_k * p.plan.shape.fc2_k_tiles * 16,
                        blockIdx.x * kThreads + threadIdx.x - 32 * (kRequester + 1),
                        gridDim.x * kThreads);
  }

  // The finishers: tell the multipliers that this CTA's part of h is written, and whether the grid
  // is resident, so that the others' parts will be.
  __device__ __forceinline__ void say_first_is_finished(bool resident) {
    if (threadIdx.x == 32 * (kRequester + 1)) tables().control[kResident] = resident;
    sync_finishers();  // compute-sanitizer's racecheck takes no word for it from the next one alone
    sync_workers();
  }
  // Whether it is resident; the multipliers know after the second product.
  __device__ __forceinline__ bool resident() const { return resident_; }

  // The finishers: bring near what is needed later and is little, and not behind many weights.
  __device__ __forceinline__ void begin_finishing() {
    sync_all();
    prepare_finishing();
  }
  __device__ __forceinline__ void prepare_finishing() {
    const int thread = threadIdx.x - 32 * (kRequester + 1);
#pragma unroll 1
    for (int i = thread; i < items(); i += 32 * kMoeFinishWarps) {
      this->store_factors(i);
    }
    if (kHasFc2) {
#pragma unroll 1
      for (int i = thread; i < p.num_tokens * p.top_k; i += 32 * kMoeFinishWarps) {
        tables().pair_weight[i] = p.topk_weights[i];
      }
    }
    sync_finishers();
  }

  // The finishers: add up and finish what the multipliers hand on, a run of units after another.
  template <int kProduct>
  __device__ __forceinline__ void finish(const Product& it) {
    // A barrier tells only its last two phases apart. So many walkers that each has seen, or taken,
    // a team's sum number n - kMoeReduceStages before it waits for number n.
    constexpr int kWalkers = kMoeFinishWarps, kRun = kProduct == 1 ? kFc1Run : 1;
    static_assert(kWalkers * kRun <= kMoeReduceStages);
    constexpr Divisor kByWalkers = DivisorOf(kWalkers);
    const int walker = warp - kRequester - 1;
    const TeamSums sums = this->sums(kProduct);
    const int teams = it.shape.teams, limit = it.share.limit.by;
    auto output = [&] {
      if constexpr (kProduct == 1) {
        return IntermediateOutput<Recipe>(p, tables(), lane);
      } else {
        return RowOutput<Recipe>(p, tables(), this->y_rows(), lane);
      }
    }();
    int team = walker, count = 0, major = it.share.major, minor = it.share.minor + walker * kRun;
#pragma unroll 1
    for (int left = it.share.units_of(kByWalkers, walker); left > 0; left -= kRun) {
#pragma unroll 1
      for (; team >= teams; team -= teams) count += kRun;
#pragma unroll 1
      for (; minor >= limit; minor -= limit) ++major;
      output.prepare(major, minor);
      float acc[kRun][4];
#pragma unroll
      for (int i = 0; i < kRun; ++i) sums.take(acc[i], it.shape, team, count + i, lane);
      output.store(major, minor, acc);
      team += kWalkers;
      minor += kWalkers * kRun;
    }
  }

  // Only the tables that finish_expert() reads.
  __device__ __forceinline__ void begin_finish() {
    if (p.num_tokens > 1) {
      list_many_tokens(p, tables(), [] {});
    } else if (warp == 0) {
      list_one_token(p, tables(), lane, lane < p.top_k ? p.topk_ids[lane] : -1);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < p.num_tokens * p.top_k; i += kMoeDecodeThreads) {
      tables().pair_weight[i] = p.topk_weights[i];
    }
    sync_multipliers();
  }

 protected:
  static constexpr int kRequester = kMoeDecodeWarps;  // the warps after it finish
  static constexpr int kResident = 20;                // word of the tables' control

  __device__ __forceinline__ int items() const { return tables().control[0]; }
  __device__ __forceinline__ TeamSums sums(int product) const {
    return TeamSums(base + p.plan.shared.reduce, product);
  }

  template <int kProduct>
  __device__ __forceinline__ int item_at(const UnitWalk& unit) const {
    return kProduct == 2 && owner ? unit.minor : unit.major;
  }
  // A step's weights, for request_units(); `expert` is that of this lane's unit.
  template <int kProduct>
  __device__ __forceinline__ UnitRequest request_of(const Product& it, const UnitWalk& unit,
                                                    int expert) const {
    const bool mine = lane < it.shape.teams && unit.index < it.share.units;
    const uint32_t teams = __popc(__ballot_sync(0xFFFFFFFFu, mine));
    if (teams == 0) return {nullptr, 0, 0};
    const int row_tile = kProduct == 2 && owner ? this->owned_row_tile(unit.major) : unit.minor;
    const uint32_t row = expert * it.row_tiles + row_tile;
    const uint8_t* weights = kProduct == 1 ? p.w13 : p.w2;
    const uint8_t* source = weights + static_cast<uint64_t>(row) * (it.k_tiles * kTileBytes);
    return {mine ? source : nullptr, teams, it.k_tiles};
  }
  // Requests a product's weights. Run by one warp.
  template <int kProduct>
  __device__ __forceinline__ void request_units(const Product& it, uint64_t policy) {
    request_units<kProduct>(it, UnitWalk::of(it.share, it.shape.teams, lane), policy);
  }
  // Those of `unit` and after it.
  template <int kProduct>
  __device__ __forceinline__ void request_units(const Product& it, UnitWalk unit, uint64_t policy) {
    while (true) {
      const bool mine = lane < it.shape.teams && unit.index < it.share.units;
      const int expert =
          mine ? WorkItem::unpack(tables().items[item_at<kProduct>(unit)]).expert : 0;
      UnitRequest request = request_of<kProduct>(it, unit, expert);
      if (request.teams == 0) return;
      request.all_chunks(ring, it.shape.split, lane, policy);
      unit.next();
    }
  }

  // Multiplies this warp's tiles of a product's units, at most kChunks of a unit; 0 stands for any
  // number.
  template <int kProduct, int kChunks>
  __device__ __forceinline__ void multiply_units(const Product& it) {
    const int split = it.shape.split, k_tiles = it.k_tiles;
    const int team = it.shape.team_of >> 4 * warp & 15, rank = it.shape.rank_of >> 4 * warp & 15;
    // The activations: this lane's columns of the first tile, and how many columns a row has from
    // there on.
    int columns = k_tiles * kTileColumns;
    int64_t row_bytes = columns * 2;
    const char* rows = static_cast<const char*>(p.h);
    if constexpr (kProduct == 1) {
      if constexpr (Recipe::kQuantized) {
        rows = static_cast<const char*>(p.input);
        if (p.plan.input_in_shared) {
          rows = memory + p.plan.shared.input;
          row_bytes = p.plan.shared.input_row_bytes;
        }
      } else {
        rows = static_cast<const char*>(p.x);
        columns = p.hidden;
        row_bytes = int64_t{columns} * 2;
      }
    }
    rows += rank * kTileRowBytes + (lane & 3) * 16;
    columns -= rank * kTileColumns + (lane & 3) * 8;
    const bool last_exists = (it.shape.chunks - 1) * split + rank < k_tiles;
    TeamSumWriter sums(this->sums(kProduct), team, warp, lane);

    // Every warp goes through the stages of all steps; this warp's team has the units of the first.
    const int steps = it.share.units_of(it.shape.by_teams, 0);
    const int mine = it.shape.idle >> warp & 1 ? 0 : it.share.units_of(it.shape.by_teams, team);
    int count = 0;
#pragma unroll 1
    while (count < mine) {
      const UnitRun unit = UnitRun::of(it.share, it.shape.teams, team, count);
      const WorkItem item = item_of<kProduct>(unit);
      // Units of the same activations.
      int end = mine;
      if (kProduct == 2 || p.num_tokens > 1) {
        const int runs =
            kProduct == 2 && owner ? 1 : unit.runs_of_major(it.share, it.shape.by_teams);
        end = min(mine, count + runs * it.share.run);
      }
      const Activations from{rows, row_bytes, columns};
      if (kProduct == 2 && kHasFc1 && count == 0) see_first_is_finished();
      if (item.rows == 1) {
        multiply_run<kProduct, kChunks, true>(it, item, from, end - count, last_exists, sums);
      } else {
        multiply_run<kProduct, kChunks, false>(it, item, from, end - count, last_exists, sums);
      }
      count = end;
    }
    if (kProduct == 2 && kHasFc1 && mine == 0) see_first_is_finished();
#pragma unroll 1
    for (int left = (steps - mine) * it.shape.chunks; left > 0; --left) skip();
  }

  __device__ __forceinline__ void see_first_is_finished() {
    sync_workers();
    resident_ = tables().control[kResident] != 0;
  }

  // Where this lane's activations are: its columns of a row's first tile of this warp, and how many
  // columns the row has from there on.
  struct Activations {
    const char* rows;
    int64_t row_bytes;
    int columns;
  };

  // Multiplies this warp's tiles of `units` units of the same activations.
  template <int kProduct, int kChunks, bool kOneToken>
  __device__ __forceinline__ void multiply_run(const Product& it, const WorkItem& item,
                                               const Activations& from, int units, bool last_exists,
                                               TeamSumWriter& sums) {
    constexpr int kHeld = kChunks == 0 ? 1 : kChunks;
    const int split = it.shape.split, chunks = it.shape.chunks;
    const char* row = from.rows + activation_row<kProduct, kOneToken>(item) * from.row_bytes;
    uint4 b[kHeld][4];
    // The activations of kHeld chunks, from one on.
    auto load = [&](int chunk) {
      load_activations<kProduct, kHeld, kOneToken>(b, row + chunk * split * kTileRowBytes,
                                                   from.columns - chunk * split * kTileColumns,
                                                   split);
    };
    if (kChunks > 0) load(0);
    const auto tile_lane = TileLane<kOneToken>::of(lane);
    const uint32_t tile = warp * kTileBytes;
#pragma unroll 1
    for (; units > 0; --units) {
      float acc[2][4] = {};
      auto multiply = [&](const uint4(&with)[4]) {
        const auto weights = TileRegisters::load<kOneToken>(ring.wait() + tile, tile_lane);
        ring.release(lane);
        if constexpr (kOneToken) {
          Math::multiply_one_token(weights, with, acc[0]);
        } else {
          Math::multiply(weights, with, acc[0], acc[1]);
        }
      };
      if constexpr (kChunks > 0) {
#pragma unroll
        for (int k = 0; k + 1 < kChunks; ++k) multiply(b[k]);
        if (last_exists) {
          multiply(b[kHeld - 1]);
        } else {
          skip();
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < chunks; ++k) {
          if (k + 1 == chunks && !last_exists) {
            skip();
            continue;
          }
          load(k);
          multiply(b[0]);
        }
      }
      if constexpr (!kOneToken) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][i] = __fadd_rn(acc[0][i], acc[1][i]);
      }
      sums.put(acc[0], lane);
    }
  }

  // Sees a stage pass in which this warp has nothing.
  __device__ __forceinline__ void skip() {
    ring.wait();
    ring.release(lane);
  }

  template <int kProduct>
  __device__ __forceinline__ WorkItem item_of(const UnitRun& unit) const {
    return WorkItem::unpack(tables().items[kProduct == 2 && owner ? unit.minor : unit.major]);
  }

  // The row of activations that this lane multiplies. Lanes without a token take the last token's:
  // their columns of the product are thrown away.
  template <int kProduct, bool kOneToken>
  __device__ __forceinline__ int activation_row(const WorkItem& item) const {
    const int row = item.first_row + (kOneToken ? 0 : min(lane >> 2, item.rows - 1));
    return kProduct == 1 ? tables().row_token[row] : row;
  }

  // Activations of kHeld tiles, `split` tiles apart. `columns`: how many columns a row has left,
  // from this lane's first one on.
  template <int kProduct, int kHeld, bool kOneToken>
  __device__ __forceinline__ void load_activations(uint4 (&b)[kHeld][4], const char* from,
                                                   int columns, int split) const {
    constexpr int kSteps = kOneToken ? 1 : 4;
    // One token: this lane has activations of one step of a tile, or of none.
    const int only = lane >> 3;
    uint4 v[kHeld][kSteps];
    uint32_t most;
    do {
      most = 0;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const int step = kOneToken ? only : j, tiles = k * split;
          v[k][j] = uint4{0, 0, 0, 0};
          if ((!kOneToken || Math::one_token_lane(lane)) &&
              tiles * kTileColumns + 32 * step < columns) {
            v[k][j] = load<kProduct>(from + tiles * kTileRowBytes + 64 * step);
          }
        }
      }
      if (kProduct == 2 && kHasFc1) {
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
#pragma unroll
          for (int j = 0; j < kSteps; ++j) most = ptx::most_of(most, v[k][j]);
        }
      }
    } while (kProduct == 2 && kHasFc1 && resident_ && ptx::has_unwritten_half(most));
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if constexpr (kOneToken) {
        Math::one_token_operand(v[k][0], only, b[k]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) b[k][j] = v[k][j];
      }
    }
  }

  template <int kProduct>
  __device__ __forceinline__ uint4 load(const char* from) const {
    if (kProduct == 2 && kHasFc1) return ptx::load_16_as_it_is(from);
    return ptx::load_16(from);
  }

  static constexpr int kTileRowBytes = kTileColumns * 2;

  const int warp;
  const uint32_t base;
  WeightRing ring;
  bool resident_ = false;
};

}  // namespace b12x
