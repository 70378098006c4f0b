// From routing ids to work: which experts are touched, by which tokens.
//
// Every CTA builds the same list, so that no launch and no exchange between CTAs is needed. An
// *item* is an expert with up to 8 of its tokens; a *row* is one (token, expert) that is really
// routed, numbered expert by expert in token order; a *pair* is a (token, slot) of the routing
// table. Ids outside the experts (padding: -1) make no row. A token that names an expert twice has
// one row for both of its pairs.
#pragma once

#include <cstdint>

#include "cuda/moe/divide.cuh"
#include "cuda/moe/params.h"
#include "cuda/ptx/named_barrier.cuh"

namespace b12x {

inline constexpr uint32_t kNoRow = 0xFFFF;

struct WorkItem {
  int32_t expert;
  int32_t first_row;
  int32_t rows;  // 1..8

  static __device__ __forceinline__ uint32_t pack(int expert, int first_row, int rows) {
    return static_cast<uint32_t>(expert) | static_cast<uint32_t>(first_row) << 12 |
           static_cast<uint32_t>(rows) << 24;
  }
  static __device__ __forceinline__ WorkItem unpack(uint32_t word) {
    return {static_cast<int32_t>(word & 0xFFF), static_cast<int32_t>(word >> 12 & 0xFFF),
            static_cast<int32_t>(word >> 24)};
  }
};

struct WorkTables {
  float4* factors;
  uint32_t* items;
  float* pair_weight;
  uint16_t* pair_row;
  uint16_t* row_token;
  uint32_t* control;  // [0] number of items; [1..16] sums of warps; [20] the grid is resident
  uint32_t*
      prologue;  // scratch of the prologue: three arrays of [num_experts] words, this far apart
  static constexpr int kPrologueWords = kMoeReduceBytes / 4;
};

// The warps of a CTA that multiply, those that finish, both of these, and all with the one that
// requests weights: each meets at a barrier of its own.
inline constexpr int kMoeWorkerThreads = kMoeDecodeLaunchThreads - 32;
__device__ __forceinline__ void sync_multipliers() { ptx::named_sync<1, kMoeDecodeThreads>(); }
__device__ __forceinline__ void sync_all() { ptx::named_sync<2, kMoeDecodeLaunchThreads>(); }
// Counts as having come to sync_all(), without waiting.
__device__ __forceinline__ void pass_sync_all() { ptx::named_arrive<2, kMoeDecodeLaunchThreads>(); }
__device__ __forceinline__ void sync_workers() { ptx::named_sync<3, kMoeWorkerThreads>(); }
// Those that finish, once the one that requests has passed.
__device__ __forceinline__ void sync_marked() { ptx::named_sync<5, 32 * kMoeFinishWarps + 32>(); }
__device__ __forceinline__ void pass_sync_marked() {
  ptx::named_arrive<5, 32 * kMoeFinishWarps + 32>();
}
__device__ __forceinline__ void sync_finishers() { ptx::named_sync<4, 32 * kMoeFinishWarps>(); }
// True when all of their threads say so.
__device__ __forceinline__ bool all_finishers(bool value) {
  return ptx::named_all<4, 32 * kMoeFinishWarps>(value);
}

// One token, whose lane-th id is `id`: its pairs in order are its items. Run by one warp.
__device__ __forceinline__ void list_one_token(const MoeDecodeParams& p, const WorkTables& tables,
                                               int lane, int id) {
  const bool routed = id >= 0 && id < p.num_experts;
  const uint32_t all = __ballot_sync(0xFFFFFFFFu, routed);
  const int row = __popc(all & ((1u << lane) - 1));
  if (routed) {
    tables.items[row] = WorkItem::pack(id, row, 1);
    tables.row_token[row] = 0;
  }
  if (lane < p.top_k) tables.pair_row[lane] = routed ? row : kNoRow;
  if (lane == 0) tables.control[0] = __popc(all);
}

// Any number of tokens up to 64. Run by all multiplying warps. Once the items are there, it calls
// when_items_are_listed(); it ends without a barrier after its last writes, those to pair_row and
// row_token.
template <typename Barrier>
__device__ __forceinline__ void list_many_tokens(const MoeDecodeParams& p, const WorkTables& tables,
                                                 Barrier when_items_are_listed) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int pairs = p.num_tokens * p.top_k;
  // Which tokens chose an expert: one bit a token, which adds up the same in any order.
  uint32_t* low = tables.prologue;
  static_assert(kMoeMaxExperts * 4 <= kMoeReducePartBytes && kMoeReduceStages >= 3,
                "the prologue's arrays lie beside the barriers of the sums");
  uint32_t* high = low + WorkTables::kPrologueWords;
  uint32_t* base = high + WorkTables::kPrologueWords;
  constexpr int kPairsPerThread = kMoeMaxTokens * kMoeMaxTopK / kMoeDecodeThreads;
  int ids[kPairsPerThread];
#pragma unroll
  for (int i = 0; i < kPairsPerThread; ++i) {
    const int pair = thread + i * kMoeDecodeThreads;
    ids[i] = pair < pairs ? p.topk_ids[pair] : -1;
  }
  int tokens[kPairsPerThread];
#pragma unroll
  for (int i = 0; i < kPairsPerThread; ++i) {
    tokens[i] = divide(thread + i * kMoeDecodeThreads, p.plan.by_top_k);
  }
#pragma unroll 1
  for (int e = thread; e < p.num_experts; e += kMoeDecodeThreads) low[e] = high[e] = 0;
  sync_multipliers();
#pragma unroll
  for (int i = 0; i < kPairsPerThread; ++i) {
    if (ids[i] >= 0 && ids[i] < p.num_experts) {
      atomicOr((tokens[i] < 32 ? low : high) + ids[i], 1u << (tokens[i] & 31));
    }
  }
  sync_multipliers();
  // Prefix sums over experts of rows (low half) and items (high half).
  constexpr int kExpertsPerThread = kMoeMaxExperts / kMoeDecodeThreads;
  uint32_t counts[kExpertsPerThread], total = 0;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = thread * kExpertsPerThread + i;
    const uint32_t rows = e < p.num_experts ? __popc(low[e]) + __popc(high[e]) : 0;
    counts[i] = rows;
    total += rows | (rows + kMoeTokenGroup - 1) / kMoeTokenGroup << 16;
  }
  uint32_t inclusive = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(0xFFFFFFFFu, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) tables.control[1 + warp] = inclusive;
  sync_multipliers();
  uint32_t before = inclusive - total, everything = 0;
  const int counting = (p.num_experts - 1) / (32 * kExpertsPerThread) + 1;  // warps with experts
#pragma unroll 2
  for (int w = 0; w < counting; ++w) {
    const uint32_t sum = tables.control[1 + w];
    if (w < warp) before += sum;
    everything += sum;
  }
  if (thread == 0) tables.control[0] = everything >> 16;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = thread * kExpertsPerThread + i;
    if (e < p.num_experts) base[e] = before & 0xFFFF;
    int row = before & 0xFFFF, item = before >> 16;
#pragma unroll 1
    for (int left = counts[i]; left > 0; left -= kMoeTokenGroup) {
      const int rows = left < kMoeTokenGroup ? left : kMoeTokenGroup;
      tables.items[item++] = WorkItem::pack(e, row, rows);
      row += rows;
    }
    before += counts[i] | (counts[i] + kMoeTokenGroup - 1) / kMoeTokenGroup << 16;
  }
  sync_multipliers();
  when_items_are_listed();
#pragma unroll
  for (int i = 0; i < kPairsPerThread; ++i) {
    const int pair = thread + i * kMoeDecodeThreads;
    if (pair >= pairs) continue;
    uint32_t row = kNoRow;
    if (ids[i] >= 0 && ids[i] < p.num_experts) {
      const int token = tokens[i];
      const uint32_t below = (1u << (token & 31)) - 1;
      row = base[ids[i]] + (token < 32 ? __popc(low[ids[i]] & below)
                                       : __popc(low[ids[i]]) + __popc(high[ids[i]] & below));
      tables.row_token[row] = static_cast<uint16_t>(token);
    }
    tables.pair_row[pair] = static_cast<uint16_t>(row);
  }
}

}  // namespace b12x
