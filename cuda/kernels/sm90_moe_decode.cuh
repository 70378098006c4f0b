// MoE decode on Hopper: both products of the touched experts at the speed of reading their weights
// once.
//
// Weights are the MMA's A operand (16 rows), up to 8 tokens its N side. Each of a CTA's 16 warps
// streams its own tiles through its own ring of bulk copies and meets the others only where partial
// sums join. The parts below are shared by the fused kernel and the split ones, so that all give
// the same bits.
#pragma once

#include <cstdint>

#include "cuda/formats/fp4_tile.cuh"
#include "cuda/moe/activation.cuh"
#include "cuda/moe/nvfp4_quantize.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/weight_stream.cuh"
#include "cuda/moe/work_list.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace b12x {

// kFp16: the products' operands are fp16. kQuantized: activations are quantized to NVFP4 on the
// fly.
template <bool kFp16_, ScaleFormat kScale_, bool kQuantized_>
struct DecodeRecipe {
  static constexpr bool kFp16 = kFp16_;
  static constexpr ScaleFormat kScale = kScale_;
  static constexpr bool kQuantized = kQuantized_;
  using Math = TileMath<kFp16, kScale>;
  static_assert(!kQuantized || !kFp16, "quantized activations are bf16 numbers");
};

using W4A16Bf16 = DecodeRecipe<false, ScaleFormat::kE4M3, false>;
using W4A16Fp16 = DecodeRecipe<true, ScaleFormat::kE4M3, false>;
using W4A16Mxfp4 = DecodeRecipe<false, ScaleFormat::kE8M0, false>;
using Nvfp4 = DecodeRecipe<false, ScaleFormat::kE4M3, true>;

// Which products a launch computes.
enum class DecodePart { kBoth, kFc1, kFc2 };

// Adds the partial sums of a team's warps, in the order of the reduction axis. The warps take turns
// in adding up; the others go on to their next unit.
class TeamSum {
 public:
  __device__ __forceinline__ TeamSum(uint32_t buffers, uint32_t barriers, const TeamShape& shape,
                                     const TeamPlace& place)
      : buffer_(buffers + (place.team << shape.log2_split) * 512),
        full_(barriers + place.team * kMoeReduceStages * 8),
        rank_(place.rank),
        size_(shape.size) {}

  // Whether this warp will be the one that adds up next.
  __device__ __forceinline__ bool mine() const { return size_ == 1 || turn_ == rank_; }

  // True in the warp that now holds the sum in `acc`. The same warp gets kRun sums in a row.
  template <int kRun>
  __device__ __forceinline__ bool add(float (&acc)[4], int lane) {
    if (size_ == 1) return true;
    const uint32_t stage = count_ % kMoeReduceStages;
    const uint32_t parity = count_ / kMoeReduceStages & 1;
    const uint32_t buffer = buffer_ + stage * (kMoeDecodeWarps * 512) + lane * 16;
    const uint32_t full = full_ + stage * 8;
    const uint32_t empty = full + kMoeDecodeWarps * kMoeReduceStages * 8;
    ptx::mbarrier_wait(empty, parity ^ 1);
    ptx::store_shared_16(buffer + rank_ * 512, {__float_as_uint(acc[0]), __float_as_uint(acc[1]),
                                                __float_as_uint(acc[2]), __float_as_uint(acc[3])});
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(full);
    const bool adds = mine();
    ++count_;
    if (count_ % kRun == 0 && ++turn_ == size_) turn_ = 0;
    if (!adds) return false;
    ptx::mbarrier_wait(full, parity);
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
#pragma unroll 4
    for (uint32_t r = 0; r < size_; ++r) {
      const uint4 part = ptx::load_shared_16(buffer + r * 512);
      acc[0] = __fadd_rn(acc[0], __uint_as_float(part.x));
      acc[1] = __fadd_rn(acc[1], __uint_as_float(part.y));
      acc[2] = __fadd_rn(acc[2], __uint_as_float(part.z));
      acc[3] = __fadd_rn(acc[3], __uint_as_float(part.w));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty);
    return true;
  }

 private:
  uint32_t buffer_, full_, rank_, size_;
  uint32_t count_ = 0, turn_ = 0;
};

template <typename Recipe, DecodePart kPart>
class MoeDecode {
 public:
  static constexpr bool kHasFc1 = kPart != DecodePart::kFc2;
  static constexpr bool kHasFc2 = kPart != DecodePart::kFc1;
  using Math = typename Recipe::Math;

  static constexpr int kFc1Run =
      Recipe::kQuantized ? 2 : 1;  // a quantization block is two row tiles

  __device__ __forceinline__ MoeDecode(const MoeDecodeParams& params, char* shared)
      : p(params),
        lane(threadIdx.x & 31),
        warp(__shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0)),  // the same for all lanes, visibly
        base(ptx::smem_address(shared)),
        memory(shared),
        ring(base + p.plan.shared.ring + warp * p.geometry.stages * kChunkTiles * kTileBytes,
             base + p.plan.shared.ring_barriers + warp * p.geometry.stages * 8, p.geometry.stages),
        place1(TeamPlace::of(warp, p.plan.fc1, p.plan.shape.fc1_k_tiles)),
        place2(TeamPlace::of(warp, p.plan.fc2, p.plan.shape.fc2_k_tiles)),
        owner(p.geometry.fc2_order == Fc2Order::kOwner) {}

  // Lists the work.
  __device__ __forceinline__ void begin() {
    ring.init(lane);
    // A barrier's address must be the same in all lanes of the instruction that sets it up: one
    // lane of each warp sets up its share.
    if (lane == 0) {
      for (int product = 0; product < 2; ++product) {
        const TeamShape& team = product == 0 ? p.plan.fc1 : p.plan.fc2;
        if (team.size == 1) continue;  // nothing to add up
        const int barriers = (kMoeDecodeWarps >> team.log2_split) * kMoeReduceStages;
        for (int i = warp; i < barriers; i += kMoeDecodeWarps) {
          const uint32_t full = reduce_barriers(product) + i * 8;
          ptx::mbarrier_init(full, team.size);
          ptx::mbarrier_init(full + kMoeDecodeWarps * kMoeReduceStages * 8, 1);
        }
      }
    }
    list_work();
    __syncthreads();
    items = tables().control[0];

    walk1.left = walk2.left = 0;
    if (kHasFc1 && place1.tiles > 0) {
      start_share<kFc1Run>(walk1, items * p.plan.shape.fc1_row_tiles, p.plan.shape.fc1_row_tiles,
                           kLog2Warps - p.plan.fc1.log2_split, place1.team);
    }
    if (kHasFc2 && place2.tiles > 0 && items > 0) {
      const int log2_teams = kLog2Warps - p.plan.fc2.log2_split;
      if (owner) {
        walk2.start<1>(0, owned_tiles() * items, items, log2_teams, place2.team);
      } else {
        start_share<1>(walk2, items * p.plan.shape.fc2_row_tiles, p.plan.shape.fc2_row_tiles,
                       log2_teams, place2.team);
      }
    }
    if (kHasFc1) {
      source = walk1;
      source_product1 = true;
    } else {
      source = walk2;
      source_product1 = false;
    }
    // What is needed later and is little is requested now, ahead of the weights: behind them it
    // would wait until all of them have come.
    for (int i = threadIdx.x; i < items; i += kMoeDecodeThreads) {
      const int e = WorkItem::unpack(tables().items[i]).expert;
      ptx::prefetch_to_l2(p.w13_global + 2 * e);
      ptx::prefetch_to_l2(p.w2_global + e);
      if (Recipe::kQuantized) ptx::prefetch_to_l2(p.w2_input + e);
    }
    const int pairs = p.num_tokens * p.top_k;
#pragma unroll
    for (int i = 0; i < kPairsPerThread; ++i) {
      const int pair = threadIdx.x + i * kMoeDecodeThreads;
      pair_weights[i] = kHasFc2 && pair < pairs ? p.topk_weights[pair] : 0.0f;
    }
    if constexpr (Recipe::kQuantized && kHasFc1) {
      start_stream();
      if (p.plan.input_in_shared) {
        quantize_input_for_this_cta();
        __syncthreads();
      }
    }
  }

  // Starts the weights on their way. The first activations should have been requested.
  __device__ __forceinline__ void start_stream() {
#pragma unroll 1
    for (int s = 0; s < p.geometry.stages; ++s) {
      refill(0);
      ring.advance();
    }
    ring.rewind();
    const int pairs = p.num_tokens * p.top_k;
#pragma unroll
    for (int i = 0; i < kPairsPerThread; ++i) {
      const int pair = threadIdx.x + i * kMoeDecodeThreads;
      if (kHasFc2 && pair < pairs) tables().pair_weight[pair] = pair_weights[i];
    }
  }

  // Quantizes this CTA's share of x to global memory. Whoever reads it must wait for the whole
  // grid.
  __device__ __forceinline__ void quantize_input_share() {
    const int chunks = p.plan.shape.fc1_k_tiles * (kTileColumns / 8);
    const int total = p.num_tokens * chunks;
    for (int first = blockIdx.x * kMoeDecodeThreads; first < total;
         first += gridDim.x * kMoeDecodeThreads) {
      const int i = first + threadIdx.x;
      const int token = i / chunks, chunk = i - token * chunks;
      const uint4 v = quantized_chunk(i < total ? token : 0, chunk);
      if (i < total) static_cast<uint4*>(p.input)[i] = v;
    }
  }

  // h = activation(x * w13), for every row.
  __device__ __forceinline__ void fc1() {
    const char* rows;
    int64_t row_bytes;
    if (Recipe::kQuantized && p.plan.input_in_shared) {
      rows = memory + p.plan.shared.input;
      row_bytes = p.plan.shared.input_row_bytes;
    } else if (Recipe::kQuantized) {
      rows = static_cast<const char*>(p.input);
      row_bytes = p.plan.shape.fc1_k_tiles * kTileColumns * 2;
    } else {
      rows = static_cast<const char*>(p.x);
      row_bytes = int64_t{p.hidden} * 2;
    }
    product<1>(rows, row_bytes, !Recipe::kQuantized && p.hidden % kTileColumns != 0);
  }

  // y = h * w2, for every row.
  __device__ __forceinline__ void fc2() {
    product<2>(static_cast<const char*>(p.h), p.plan.shape.fc2_k_tiles * kTileColumns * 2, false);
  }

  // out = sum over top-k of weight * y, in the order of the slots; NaN where `valid` is false.
  __device__ __forceinline__ void finish_owner(bool valid = true) {
    __syncthreads();  // y of all warps
    const WorkTables t = tables();
    const int column = threadIdx.x & 15;
    for (int tile = 0; tile < owned_tiles(); ++tile) {
      const float* y = y_rows() + tile * p.num_tokens * p.top_k * 16 + column;
      const int row = (blockIdx.x + tile * gridDim.x) * 16 + column;
      for (int token = threadIdx.x >> 4; token < p.num_tokens; token += kMoeDecodeThreads / 16) {
        float total = 0.0f;
        for (int s = 0; s < p.top_k; ++s) {
          const uint32_t y_row = t.pair_row[token * p.top_k + s];
          if (y_row == kNoRow) continue;
          total = __fmaf_rn(t.pair_weight[token * p.top_k + s], y[y_row * 16], total);
        }
        if (row < p.hidden) store_out(token, row, valid ? total : __uint_as_float(kNanBits));
      }
    }
  }

  __device__ __forceinline__ void finish_expert(bool valid = true) {
    const WorkTables t = tables();
    const int columns = p.plan.shape.fc2_row_tiles * 16;
    const int quads = p.hidden / 4;
    for (int i = blockIdx.x * kMoeDecodeThreads + threadIdx.x; i < p.num_tokens * quads;
         i += gridDim.x * kMoeDecodeThreads) {
      const int token = i / quads, column = (i - token * quads) * 4;
      float total[4] = {};
      for (int s = 0; s < p.top_k; ++s) {
        const uint32_t y_row = t.pair_row[token * p.top_k + s];
        if (y_row == kNoRow) continue;
        const float weight = t.pair_weight[token * p.top_k + s];
        const uint4 y = ptx::load_16(p.y + static_cast<int64_t>(y_row) * columns + column);
        total[0] = __fmaf_rn(weight, __uint_as_float(y.x), total[0]);
        total[1] = __fmaf_rn(weight, __uint_as_float(y.y), total[1]);
        total[2] = __fmaf_rn(weight, __uint_as_float(y.z), total[2]);
        total[3] = __fmaf_rn(weight, __uint_as_float(y.w), total[3]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        store_out(token, column + c, valid ? total[c] : __uint_as_float(kNanBits));
      }
    }
  }

  // Only the tables that finish_expert() reads.
  __device__ __forceinline__ void begin_finish() {
    list_work();
    for (int i = threadIdx.x; i < p.num_tokens * p.top_k; i += kMoeDecodeThreads) {
      tables().pair_weight[i] = p.topk_weights[i];
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ WorkTables tables() const {
    const MoeDecodeSharedLayout& s = p.plan.shared;
    WorkTables t;
    t.items = reinterpret_cast<uint32_t*>(memory + s.items);
    t.pair_weight = reinterpret_cast<float*>(memory + s.pair_weight);
    t.pair_row = reinterpret_cast<uint16_t*>(memory + s.pair_row);
    t.row_token = reinterpret_cast<uint16_t*>(memory + s.row_token);
    t.control = reinterpret_cast<uint32_t*>(memory + s.control);
    t.prologue = reinterpret_cast<uint32_t*>(memory + s.reduce);
    return t;
  }
  __device__ __forceinline__ float* y_rows() const {
    return reinterpret_cast<float*>(memory + p.plan.shared.y);
  }
  __device__ __forceinline__ uint32_t reduce_barriers(int product) const {
    return base + p.plan.shared.reduce_barriers +
           product * 2 * kMoeDecodeWarps * kMoeReduceStages * 8;
  }
  __device__ __forceinline__ int owned_tiles() const {
    return p.plan.owned_tiles + (static_cast<int>(blockIdx.x) < p.plan.owned_remainder);
  }

  __device__ __forceinline__ void list_work() {
    if (p.num_tokens == 1) {
      if (warp == 0) list_one_token(p, tables(), lane);
    } else {
      list_many_tokens(p, tables());
    }
  }

  // A unit of the second product: (owned row tile, item) or (item, row tile).
  __device__ __forceinline__ int fc2_item(const UnitWalk& unit) const {
    return owner ? unit.minor : unit.major;
  }
  __device__ __forceinline__ int fc2_row_tile(const UnitWalk& unit) const {
    return owner ? static_cast<int>(blockIdx.x + unit.major * gridDim.x) : unit.minor;
  }

  // Requests the next chunk of this warp's stream, if there is one.
  // `nothing` is 0.
  __device__ __forceinline__ void refill(uint32_t nothing) {
    if (source_tiles == 0) {
      if (kHasFc1 && kHasFc2 && source_product1 && source.left == 0) {
        source_product1 = false;
        source = walk2;
      }
      if (source.left == 0) return;
      const bool first = kHasFc1 && source_product1;
      const MoeDecodeShape& shape = p.plan.shape;
      const int expert =
          WorkItem::unpack(tables().items[first ? source.major : fc2_item(source)]).expert;
      const uint32_t row = first ? expert * shape.fc1_row_tiles + source.minor
                                 : expert * shape.fc2_row_tiles + fc2_row_tile(source);
      const uint32_t k_tiles = first ? shape.fc1_k_tiles : shape.fc2_k_tiles;
      const int first_tile = first ? place1.first_tile : place2.first_tile;
      source_tile = (first ? p.w13 : p.w2) + static_cast<uint64_t>(row) * (k_tiles * kTileBytes) +
                    first_tile * kTileBytes;
      source_tiles = first ? place1.tiles : place2.tiles;
      if (first) {
        source.template next<kFc1Run>();
      } else {
        source.template next<1>();
      }
    }
    const int tiles = min(source_tiles, kChunkTiles);
    ring.load(source_tile + nothing, tiles, lane);
    source_tile += tiles * kTileBytes;
    source_tiles -= tiles;
  }

  // The chunk at hand has been read: its place takes the next one of the stream. `last_read` is
  // what the last read gave. Every lane must have it before the copy engine may write there, so the
  // request is made to depend on it; a barrier would only order the reads' issue.
  __device__ __forceinline__ void release_chunk(uint32_t last_read) {
    refill(__reduce_or_sync(0xFFFFFFFFu, last_read) & p.plan.zero);
    ring.advance();
  }

  // One of the two products: every unit of this warp's team, over this warp's tiles of the
  // reduction axis. `rows` holds the activations, `row_bytes` apart; `ragged` says that rows end
  // within the last tile.
  template <int kProduct>
  __device__ __forceinline__ void product(const char* rows, int64_t row_bytes, bool ragged) {
    constexpr int kRun = kProduct == 1 ? kFc1Run : 1;
    constexpr int kTileRowBytes = kTileColumns * 2;
    const TeamPlace& place = kProduct == 1 ? place1 : place2;
    TeamSum sum(base + p.plan.shared.reduce, reduce_barriers(kProduct - 1),
                kProduct == 1 ? p.plan.fc1 : p.plan.fc2, place);
    // This lane's columns of the first tile, and how many columns a ragged row has from there on.
    rows += place.first_tile * kTileRowBytes + (lane & 3) * 16;
    const int columns = p.hidden - place.first_tile * kTileColumns - (lane & 3) * 8;

    UnitWalk unit = kProduct == 1 ? walk1 : walk2;
    uint4 b0[4], b1[4];  // of the two tiles at hand
    const char* next = nullptr;
    if (unit.left > 0) {
      next = rows + activation_row<kProduct>(unit) * row_bytes;
      load_activations(b0, next, ragged, columns);
      load_activations(b1, place.tiles > 1 ? next + kTileRowBytes : next, ragged,
                       columns - kTileColumns);
    }
    // Quantized activations are made after the stream is under way, and an fc2 of its own starts it
    // before it waits for the fc1.
    if (kProduct == 1 && !Recipe::kQuantized) start_stream();
    float held[2] = {0.0f, 0.0f};
    while (unit.left > 0) {
      UnitWalk after = unit;
      after.template next<kRun>();
      Factors factors{};
      if (sum.mine()) factors = factors_of<kProduct>(unit);
      float acc0[4] = {}, acc1[4] = {};
#pragma unroll 1
      for (int k = 0; k < place.tiles;) {
        const bool two = k + 1 < place.tiles;
        const uint32_t tile = ring.wait();
        const TileRegisters weights0 = TileRegisters::load(tile, lane);
        const TileRegisters weights1 = TileRegisters::load(two ? tile + kTileBytes : tile, lane);
        release_chunk(weights1.words[1].w);
        Math::multiply(weights0, b0, acc0, acc1);
        // The next tiles' activations; after the last tile of all, the same ones, for nothing.
        k += kChunkTiles;
        next += kChunkTiles * kTileRowBytes;
        int left = columns - k * kTileColumns;
        int tiles_left = place.tiles - k;
        if (tiles_left <= 0) {
          next = rows;
          left = columns;
          tiles_left = place.tiles;
          if (after.left > 0) next += activation_row<kProduct>(after) * row_bytes;
        }
        load_activations(b0, next, ragged, left);
        if (two) Math::multiply(weights1, b1, acc0, acc1);
        load_activations(b1, tiles_left > 1 ? next + kTileRowBytes : next, ragged,
                         left - kTileColumns);
      }
      join(acc0, acc1);
      if (sum.template add<kRun>(acc0, lane)) {
        if constexpr (kProduct == 1) {
          finish_fc1(unit, factors, acc0, held);
        } else {
          finish_fc2(unit, factors, acc0);
        }
      }
      unit = after;
    }
  }

  // What the sums of an expert are multiplied with, and the scale that its intermediate is
  // quantized with.
  struct Factors {
    float first, second;  // gate and up, or down and nothing
    float intermediate;
  };

  template <int kProduct>
  __device__ __forceinline__ Factors factors_of(const UnitWalk& unit) const {
    const int e =
        WorkItem::unpack(tables().items[kProduct == 1 ? unit.major : fc2_item(unit)]).expert;
    Factors f{1.0f, 1.0f, 1.0f};
    if constexpr (Recipe::kQuantized) f.intermediate = p.w2_input[e];
    if constexpr (kProduct == 1) {
      const float2 scales = *reinterpret_cast<const float2*>(p.w13_global + 2 * e);
      const float input = Recipe::kQuantized ? usable_global_scale(*p.w13_input) : 1.0f;
      f.first = __fmul_rn(input, scales.x);
      f.second = __fmul_rn(input, scales.y);
    } else {
      f.first = p.w2_global[e];
      if constexpr (Recipe::kQuantized) {
        f.first = __fmul_rn(usable_global_scale(f.intermediate), f.first);
      }
    }
    f.first *= Math::kProductScale;  // a power of two: exact
    f.second *= Math::kProductScale;
    return f;
  }

  // The row of activations that this lane multiplies. Lanes without a token take the last token's:
  // their columns of the product are thrown away.
  template <int kProduct>
  __device__ __forceinline__ int activation_row(const UnitWalk& unit) const {
    const WorkItem item =
        WorkItem::unpack(tables().items[kProduct == 1 ? unit.major : fc2_item(unit)]);
    const int row = item.first_row + min(lane >> 2, item.rows - 1);
    return kProduct == 1 ? tables().row_token[row] : row;
  }

  // `columns`: how many columns a ragged row has left, from this lane's first one on.
  static __device__ __forceinline__ void load_activations(uint4 (&b)[4], const char* from,
                                                          bool ragged, int columns) {
    if (ragged && columns < kTileColumns) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b[j] = 32 * j < columns ? ptx::load_16(from + 64 * j) : uint4{0, 0, 0, 0};
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = ptx::load_16(from + 64 * j);
    }
  }

  static __device__ __forceinline__ void join(float (&acc0)[4], const float (&acc1)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc0[i] = __fadd_rn(acc0[i], acc1[i]);
  }

  // All of x, quantized, to shared memory.
  __device__ __forceinline__ void quantize_input_for_this_cta() {
    const int chunks = p.plan.shape.fc1_k_tiles * (kTileColumns / 8);
    const uint32_t input = base + p.plan.shared.input;
    for (int token = 0; token < p.num_tokens; ++token) {
#pragma unroll 1
      for (int first = 0; first < chunks; first += kMoeDecodeThreads) {
        const int chunk = first + threadIdx.x;
        const uint4 v = quantized_chunk(token, chunk);
        if (chunk < chunks) {
          ptx::store_shared_16(input + token * p.plan.shared.input_row_bytes + chunk * 16, v);
        }
      }
    }
  }

  // 8 of a block's 16 numbers, quantized; the others are in the neighbouring lane. Zero past the
  // end.
  __device__ __forceinline__ uint4 quantized_chunk(int token, int chunk) const {
    const float global_scale = *p.w13_input;
    uint4 v = {0, 0, 0, 0};
    if (chunk * 8 < p.hidden) {
      v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) +
                                          static_cast<int64_t>(token) * p.hidden + chunk * 8);
    }
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float x[8], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = to_float(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)), p.x_is_fp16);
      amax = max_or_nan(amax, fabsf(x[i]));
    }
    amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    const float scale = nvfp4_block_scale(amax, global_scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = from_float(nvfp4_round(x[2 * i], scale, global_scale), false) |
                 uint32_t{from_float(nvfp4_round(x[2 * i + 1], scale, global_scale), false)} << 16;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // Sums of 8 intermediate columns (gate in acc[0..1], up in acc[2..3]; tokens 2 t and 2 t + 1) ->
  // h.
  __device__ __forceinline__ void finish_fc1(const UnitWalk& unit, const Factors& factors,
                                             const float (&acc)[4], float (&held)[2]) {
    const WorkItem item = WorkItem::unpack(tables().items[unit.major]);
    const int row_tile = unit.minor;
    const int g = lane >> 2, t = lane & 3;
    const int column = row_tile * 8 + g;
    float gate_bias = 0.0f, up_bias = 0.0f;
    if (p.w13_bias != nullptr && column < p.intermediate) {
      const float* bias =
          p.w13_bias + static_cast<int64_t>(item.expert) * 2 * p.intermediate + column;
      gate_bias = bias[0];
      up_bias = bias[p.intermediate];
    }
    float h[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      h[i] = activate(p.activation, p.alpha, p.limit,
                      __fadd_rn(__fmul_rn(acc[i], factors.first), gate_bias),
                      __fadd_rn(__fmul_rn(acc[2 + i], factors.second), up_bias));
    }
    const int width = p.plan.shape.fc2_k_tiles * kTileColumns;
    uint16_t* out = static_cast<uint16_t*>(p.h) + static_cast<int64_t>(item.first_row) * width;
    if constexpr (Recipe::kQuantized) {
      if ((row_tile & 1) == 0) {  // the block's other half comes next, to this warp
        held[0] = h[0];
        held[1] = h[1];
        return;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float amax = max_or_nan(fabsf(held[i]), fabsf(h[i]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
        }
        const float scale = nvfp4_block_scale(amax, factors.intermediate);
        if (2 * t + i < item.rows) {
          uint16_t* row = out + (2 * t + i) * width + column;
          row[-8] = from_float(nvfp4_round(held[i], scale, factors.intermediate), false);
          row[0] = from_float(nvfp4_round(h[i], scale, factors.intermediate), false);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (2 * t + i < item.rows)
          out[(2 * t + i) * width + column] = from_float(h[i], Recipe::kFp16);
      }
    }
    if (row_tile == p.plan.shape.fc1_row_tiles - 1) {
      // The padding of h meets weights that are zero, and must not be a NaN.
      const int pad = width - p.plan.shape.fc1_row_tiles * 8;
      for (int i = lane; i < item.rows * pad; i += 32) {
        out[i / pad * width + p.plan.shape.fc1_row_tiles * 8 + i % pad] = 0;
      }
    }
  }

  __device__ __forceinline__ void finish_fc2(const UnitWalk& unit, const Factors& factors,
                                             const float (&acc)[4]) {
    const WorkItem item = WorkItem::unpack(tables().items[fc2_item(unit)]);
    const int g = lane >> 2, t = lane & 3;
    const int first = fc2_row_tile(unit) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = g + (i / 2) * 8;
      const int token = 2 * t + (i & 1);
      if (token >= item.rows) continue;
      float y = __fmul_rn(acc[i], factors.first);
      if (p.w2_bias != nullptr && first + column < p.hidden) {
        y = __fadd_rn(y, p.w2_bias[static_cast<int64_t>(item.expert) * p.hidden + first + column]);
      }
      const int row = item.first_row + token;
      if (owner) {
        y_rows()[(unit.major * p.num_tokens * p.top_k + row) * 16 + column] = y;
      } else {
        p.y[static_cast<int64_t>(row) * p.plan.shape.fc2_row_tiles * 16 + first + column] = y;
      }
    }
  }

  __device__ __forceinline__ void store_out(int token, int column, float value) {
    const bool fp16 = Recipe::kQuantized ? p.x_is_fp16 != 0 : Recipe::kFp16;
    static_cast<uint16_t*>(p.out)[static_cast<int64_t>(token) * p.hidden + column] =
        from_float(value, fp16);
  }

  static constexpr uint32_t kNanBits = 0x7FFFFFFF;

  const MoeDecodeParams& p;
  const int lane, warp;
  const uint32_t base;
  char* const memory;
  WeightRing ring;
  const TeamPlace place1, place2;
  const bool owner;
  int items = 0;
  UnitWalk walk1, walk2;
  static constexpr int kPairsPerThread = kMoeMaxTokens * kMoeMaxTopK / kMoeDecodeThreads;
  float pair_weights[kPairsPerThread];  // on their way to shared memory

  // The stream of weights that this warp requests, ahead of those that it multiplies.
  UnitWalk source;
  bool source_product1 = true;
  int source_tiles = 0;
  const uint8_t* source_tile = nullptr;
};

}  // namespace b12x
