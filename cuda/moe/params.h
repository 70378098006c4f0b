// What one MoE decode launch needs to know: plain pointers and numbers, passed by value.
#pragma once

#include <cstdint>

#include "cuda/moe/activation.h"

namespace b12x {

// How the second product is shared out.
enum class Fc2Order : int32_t {
  // A CTA owns 16 output columns at a time for every expert, and sums over top-k on its own.
  kOwner = 0,
  // Work goes expert by expert, so that an expert's activations are read by few CTAs; the rows go
  // through
  // global memory to a last step that sums over top-k.
  kExpert = 1,
};

// Launch geometry; jax_b12x/moe/geometry_cuda.py chooses it.
struct MoeDecodeGeometry {
  int32_t grid;       // CTAs; all resident at once
  int32_t stages;     // places in the ring of weights
  int32_t fc1_split;  // warps that share a row tile of the first product: 1..16
  int32_t fc2_split;  // likewise of the second product
  Fc2Order fc2_order;
};

inline constexpr int kMoeDecodeWarps = 16;  // that multiply
inline constexpr int kMoeDecodeThreads = 32 * kMoeDecodeWarps;
// Beside them, three warps add up and finish what they multiplied, and one requests the weights.
inline constexpr int kMoeFinishWarps = 3;
inline constexpr int kMoeDecodeLaunchThreads = kMoeDecodeThreads + 32 * kMoeFinishWarps + 32;
inline constexpr int kMoeMaxGrid = 1 << 12;
inline constexpr int kMoeMaxTokens = 64;
inline constexpr int kMoeMaxTopK = 16;
inline constexpr int kMoeMaxExperts = 1024;
inline constexpr int kMoeTileBytes = 1152;
inline constexpr int kMoeStageTileBytes = kMoeDecodeWarps * kMoeTileBytes;  // a tile for every warp
// And two barriers: full, empty. Copies are slower to places that are no multiple of 128.
inline constexpr int kMoeStageBytes = kMoeStageTileBytes + 128;
// How many lanes of a warp come to a barrier in shared memory. One does for all, beside __syncwarp;
// but compute-sanitizer's racecheck follows such a barrier only for threads that come themselves.
#ifdef B12X_RACECHECK
inline constexpr int kMoeLanesAtBarriers = 32;
#else
inline constexpr int kMoeLanesAtBarriers = 1;
#endif
inline constexpr int kMoeTokenGroup = 8;    // tokens that one pass over a weight tile serves
inline constexpr int kMoeReduceStages = 8;  // partial sums in flight a team
// One of them: [warps][32 lanes] float4, then barriers [2 products][warps] of 16 bytes: full,
// empty.
inline constexpr int kMoeReducePartBytes = kMoeDecodeWarps * 512;
inline constexpr int kMoeReduceBytes = kMoeReducePartBytes + 2 * kMoeDecodeWarps * 16;

// Up to so many tokens, quantizing x once a CTA is cheaper than meeting all other CTAs to share the
// work.
inline constexpr int kMoeSharedInputTokens = 1;

// Tile counts of the padded matrices.
struct MoeDecodeShape {
  int32_t fc1_row_tiles, fc1_k_tiles, fc2_row_tiles, fc2_k_tiles;
};

#ifdef __CUDACC__
#define B12X_HOST_DEVICE __host__ __device__
#else
#define B12X_HOST_DEVICE
#endif

// A number that is divided by often; cuda/moe/divide.cuh.
struct Divisor {
  uint32_t by;
  uint32_t reciprocal;  // 2^32 / by, rounded down; 2^32 - 1 of 1
};

B12X_HOST_DEVICE constexpr Divisor DivisorOf(uint32_t by) {
  return {by, static_cast<uint32_t>(by == 1 ? 0xFFFFFFFFu : (uint64_t{1} << 32) / by)};
}

B12X_HOST_DEVICE inline int32_t CeilDiv(int32_t a, int32_t b) { return (a + b - 1) / b; }

B12X_HOST_DEVICE inline MoeDecodeShape ShapeOf(int32_t hidden, int32_t intermediate) {
  // Two row tiles (16 intermediate columns) are one NVFP4 block of the intermediate.
  return {2 * CeilDiv(intermediate, 16), CeilDiv(hidden, 128), CeilDiv(hidden, 16),
          CeilDiv(intermediate, 128)};
}

// Byte offsets of what lies in shared memory; the same on host and device.
struct MoeDecodeSharedLayout {
  int32_t ring;    // [stages] of kMoeStageBytes: weight tiles of all warps, barriers
  int32_t reduce;  // [reduce stages] of kMoeReduceBytes; the prologue's tables before that
  int32_t y;       // kOwner: [owned row tiles][rows][16] float
  int32_t input;   // quantized x [tokens], where it lies here
  int32_t input_row_bytes;
  int32_t factors;      // [items] float4
  int32_t items;        // [items] packed
  int32_t pair_weight;  // [tokens * top_k] float
  int32_t pair_row;     // [tokens * top_k] u16
  int32_t row_token;    // [tokens * top_k] u16
  int32_t control;      // a few words
  int32_t bytes;
};

inline MoeDecodeSharedLayout SharedLayoutOf(int32_t num_tokens, int32_t top_k, int32_t hidden,
                                            int32_t intermediate, bool input_in_shared,
                                            const MoeDecodeGeometry& geometry) {
  const MoeDecodeShape shape = ShapeOf(hidden, intermediate);
  const int32_t pairs = num_tokens * top_k;
  MoeDecodeSharedLayout s;
  s.ring = 0;
  s.reduce = geometry.stages * kMoeStageBytes;
  s.y = s.reduce + kMoeReduceStages * kMoeReduceBytes;
  s.input = s.y + (geometry.fc2_order == Fc2Order::kOwner
                       ? CeilDiv(shape.fc2_row_tiles, geometry.grid) * pairs * 64
                       : 0);
  // 64 bytes more than a multiple of 128: the rows of two tokens meet no bank twice.
  s.input_row_bytes = shape.fc1_k_tiles * 256 + 64;
  s.factors = s.input + (input_in_shared ? num_tokens * s.input_row_bytes : 0);
  s.items = s.factors + pairs * 16;
  s.pair_weight = s.items + pairs * 4;
  s.pair_row = s.pair_weight + pairs * 4;
  s.row_token = s.pair_row + pairs * 2;
  s.control = CeilDiv(s.row_token + pairs * 2, 16) * 16;
  s.bytes = s.control + 128;
  return s;
}

// How the warps of a CTA form teams: the warps of a team share a row tile, and take its tiles along
// the reduction axis in turns. The tiles that all warps take at a time are one stage of the ring.
struct TeamShape {
  int32_t split;  // warps a team
  int32_t teams;  // of a CTA
  Divisor by_teams;
  int32_t chunks;    // tiles a warp and row tile; the last one may not exist for all
  int32_t size;      // warps of a team that have tiles at all
  uint32_t idle;     // a bit for each warp that has no team, or no tiles
  uint64_t team_of;  // of each warp, four bits a warp
  uint64_t rank_of;  // its place in the team, likewise
};

// Everything that follows from shapes and geometry alone, worked out once on the host: the kernel's
// way to its first load is short.
struct MoeDecodePlan {
  MoeDecodeShape shape;
  TeamShape fc1, fc2;
  Divisor by_top_k, by_grid, by_fc1_row_tiles, by_fc2_row_tiles;
  uint32_t ring_bytes;  // of all stages
  MoeDecodeSharedLayout shared;
  bool
      input_in_shared;  // nvfp4: every CTA quantizes x for itself, rather than all of them together
  int32_t owned_tiles;  // kOwner: row tiles that every CTA has ...
  int32_t owned_remainder;  // ... and how many CTAs have one more
  bool one_token;           // fused: the kernel for a single token runs it
};

inline TeamShape TeamShapeOf(int32_t k_tiles, int32_t split) {
  TeamShape shape{split,
                  kMoeDecodeWarps / split,
                  DivisorOf(kMoeDecodeWarps / split),
                  CeilDiv(k_tiles, split),
                  split < k_tiles ? split : k_tiles,
                  0,
                  0,
                  0};
  for (int32_t warp = 0; warp < kMoeDecodeWarps; ++warp) {
    const int32_t team = warp / split, rank = warp % split;
    if (team >= shape.teams || rank >= shape.size) {
      shape.idle |= uint32_t{1} << warp;
      continue;
    }
    shape.team_of |= static_cast<uint64_t>(team) << 4 * warp;
    shape.rank_of |= static_cast<uint64_t>(rank) << 4 * warp;
  }
  return shape;
}

inline MoeDecodePlan PlanOf(int32_t num_tokens, int32_t top_k, int32_t hidden, int32_t intermediate,
                            bool quantized, const MoeDecodeGeometry& geometry) {
  MoeDecodePlan plan{};
  plan.shape = ShapeOf(hidden, intermediate);
  plan.fc1 = TeamShapeOf(plan.shape.fc1_k_tiles, geometry.fc1_split);
  plan.fc2 = TeamShapeOf(plan.shape.fc2_k_tiles, geometry.fc2_split);
  plan.by_top_k = DivisorOf(top_k);
  plan.by_grid = DivisorOf(geometry.grid);
  plan.by_fc1_row_tiles = DivisorOf(plan.shape.fc1_row_tiles);
  plan.by_fc2_row_tiles = DivisorOf(plan.shape.fc2_row_tiles);
  plan.ring_bytes = static_cast<uint32_t>(geometry.stages * kMoeStageBytes);
  plan.input_in_shared = quantized && num_tokens <= kMoeSharedInputTokens;
  plan.shared =
      SharedLayoutOf(num_tokens, top_k, hidden, intermediate, plan.input_in_shared, geometry);
  plan.owned_tiles = plan.shape.fc2_row_tiles / geometry.grid;
  plan.owned_remainder = plan.shape.fc2_row_tiles % geometry.grid;
  // It keeps all activations of a warp in registers, and all sums of the second product.
  const int32_t fc2_units = CeilDiv(plan.shape.fc2_row_tiles, geometry.grid) * top_k;
  plan.one_token = num_tokens == 1 && geometry.fc2_order == Fc2Order::kOwner &&
                   plan.fc1.chunks <= 3 && plan.fc2.chunks <= 3 &&
                   CeilDiv(fc2_units, plan.fc2.teams) <= kMoeReduceStages;
  return plan;
}

// What the grid barrier of a fused launch lives in; cuda/moe/grid_barrier.cuh. Split launches need
// none.
struct GridBarrierParams {
  uint64_t* word;       // on the device: zeroed once, then left alone; one launch at a time uses it
  uint32_t* fault;      // set to 1 when a wait's time is up; may be memory of the host, may be null
  uint64_t timeout_ns;  // how long a CTA waits for the others
};

inline constexpr uint64_t kGridBarrierTimeoutNs = 2'000'000'000;

struct MoeDecodeParams {
  const void* x;              // [num_tokens, hidden], bf16 or fp16
  const int32_t* topk_ids;    // [num_tokens, top_k]
  const float* topk_weights;  // [num_tokens, top_k]
  const uint8_t* w13;         // tiles [num_experts, fc1_row_tiles, fc1_k_tiles]; rows: 8 gate, 8 up
  const uint8_t* w2;          // tiles [num_experts, fc2_row_tiles, fc2_k_tiles]
  const float* w13_global;    // [num_experts, 2]
  const float* w2_global;     // [num_experts]
  const float* w13_input;  // [] global scale of the quantized input; only the nvfp4 recipe reads it
  const float* w2_input;   // [num_experts], likewise of the intermediate
  const float* w13_bias;   // [num_experts, 2 * intermediate] or null
  const float* w2_bias;    // [num_experts, hidden] or null
  void* out;               // [num_tokens, hidden], x's type
  void* h;                 // scratch: 16-bit [num_tokens * top_k, fc2_k_tiles * 128]
  void* input;             // scratch of nvfp4: bf16 [num_tokens, fc1_k_tiles * 128] (not in_shared)
  float* y;                // scratch of Fc2Order::kExpert: [num_tokens * top_k, fc2_row_tiles * 16]
  GridBarrierParams barrier;  // of fused launches

  int32_t num_tokens;
  int32_t hidden;
  int32_t intermediate;
  int32_t num_experts;
  int32_t top_k;
  int32_t x_is_fp16;
  Activation activation;
  float alpha;
  float limit;
  MoeDecodeGeometry geometry;
  MoeDecodePlan plan;
};

}  // namespace b12x
