// What comes after the second product: the sum over top-k; and what all steps of the output share.
#pragma once

#include <cstdint>

#include "cuda/moe/activation.cuh"
#include "cuda/moe/decode_recipe.cuh"
#include "cuda/moe/nvfp4_quantize.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/weight_stream.cuh"
#include "cuda/moe/work_list.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/self_flag.cuh"

namespace b12x {

template <typename Recipe>
class DecodeOutput {
 public:
  __device__ __forceinline__ DecodeOutput(const MoeDecodeParams& params, char* shared)
      : p(params),
        memory(shared),
        lane(ptx::lane()),
        owner(p.geometry.fc2_order == Fc2Order::kOwner) {}

  // out = sum over top-k of weight * y, in the order of the slots; NaN where `valid` is false. Run
  // by the finishing warps; the multipliers come to the workers' barrier too.
  __device__ __forceinline__ void finish_owner(bool valid = true) {
    sync_workers();  // y of all finishers, and the multipliers' list of rows
    const int thread = threadIdx.x - (kMoeDecodeLaunchThreads - 32 * kMoeFinishWarps);
#pragma unroll 1
    for (int tile = 0; tile < owned_tiles(); ++tile) {
#pragma unroll 1
      for (int token = thread >> 4; token < p.num_tokens; token += 2 * kMoeFinishWarps) {
        write_owned(tile, token, thread & 15, valid);
      }
    }
  }

  // Likewise, by the multiplying warps, of rows that all CTAs write; `kAsTheyCome`: that they still
  // write, where they lie marked as not written.
  template <bool kAsTheyCome>
  __device__ __forceinline__ void finish_expert(bool valid = true) {
    const WorkTables t = tables();
    const int columns = p.plan.shape.fc2_row_tiles * 16;
    const int quads = p.hidden / 4;
    // A warp of every CTA before a second one of any: what they read comes from L2.
    const int warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int i = (warp * gridDim.x + blockIdx.x) * 32 + lane; i < p.num_tokens * quads;
         i += gridDim.x * kMoeDecodeThreads) {
      const int token = divide(i, quads), column = (i - token * quads) * 4;
      float total[4] = {};
#pragma unroll 1
      for (int first = 0; first < p.top_k; first += kAtATime) {
        uint32_t row[kAtATime];
#pragma unroll
        for (int k = 0; k < kAtATime; ++k) {
          row[k] = first + k < p.top_k ? t.pair_row[token * p.top_k + first + k] : kNoRow;
        }
        uint4 y[kAtATime];
        auto are_written = [&] {
#pragma unroll
          for (int k = 0; k < kAtATime; ++k) {
            y[k] = uint4{0, 0, 0, 0};
            if (row[k] == kNoRow) continue;
            const float* from = p.y + static_cast<int64_t>(row[k]) * columns + column;
            y[k] = kAsTheyCome ? ptx::load_16_as_it_is(from) : ptx::load_16(from);
          }
          uint32_t most = 0;
#pragma unroll
          for (int k = 0; k < kAtATime; ++k) most = ptx::most_of_words(most, y[k]);
          return most != ptx::kUnwritten;
        };
        while (!are_written() && kAsTheyCome && valid) {
        }
#pragma unroll
        for (int k = 0; k < kAtATime; ++k) {
          if (row[k] == kNoRow) continue;
          const float weight = t.pair_weight[token * p.top_k + first + k];
          total[0] = __fmaf_rn(weight, __uint_as_float(y[k].x), total[0]);
          total[1] = __fmaf_rn(weight, __uint_as_float(y[k].y), total[1]);
          total[2] = __fmaf_rn(weight, __uint_as_float(y[k].z), total[2]);
          total[3] = __fmaf_rn(weight, __uint_as_float(y[k].w), total[3]);
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        store_out(token, column + c, valid ? total[c] : __uint_as_float(kNanBits));
      }
    }
  }

 protected:
  using Math = typename Recipe::Math;

  // One number of the output, of a row tile that this CTA owns.
  __device__ __forceinline__ void write_owned(int tile, int token, int column, bool valid) {
    const WorkTables t = tables();
    const float* y = y_rows() + tile * p.num_tokens * p.top_k * 16 + column;
    const int row = owned_row_tile(tile) * 16 + column;
    float total = 0.0f;
#pragma unroll 4
    for (int s = 0; s < p.top_k; ++s) {
      const uint32_t y_row = t.pair_row[token * p.top_k + s];
      const bool routed = y_row != kNoRow;
      const float value = routed ? y[y_row * 16] : 0.0f;
      const float weight = t.pair_weight[token * p.top_k + s];
      if (routed) total = __fmaf_rn(weight, value, total);
    }
    if (row < p.hidden) store_out(token, row, valid ? total : __uint_as_float(kNanBits));
  }

  __device__ __forceinline__ WorkTables tables() const {
    const MoeDecodeSharedLayout& s = p.plan.shared;
    WorkTables t;
    t.factors = reinterpret_cast<float4*>(memory + s.factors);
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

  __device__ __forceinline__ int owned_tiles() const {
    return p.plan.owned_tiles + (static_cast<int>(blockIdx.x) < p.plan.owned_remainder);
  }

  __device__ __forceinline__ int owned_row_tile(int index) const {
    return static_cast<int>(blockIdx.x + index * gridDim.x);
  }

  // What the sums of an item are multiplied with (gate, up, down), and the scale that its
  // intermediate is quantized with.
  __device__ __forceinline__ void store_factors(int item) const {
    const int e = WorkItem::unpack(tables().items[item]).expert;
    const float2 first = *reinterpret_cast<const float2*>(p.w13_global + 2 * e);
    float4 f{first.x, first.y, p.w2_global[e], 1.0f};
    if constexpr (Recipe::kQuantized) {
      const float input = usable_global_scale(*p.w13_input);
      f.w = p.w2_input[e];
      f.x = __fmul_rn(input, f.x);
      f.y = __fmul_rn(input, f.y);
      f.z = __fmul_rn(usable_global_scale(f.w), f.z);
    }
    f.x *= Math::kProductScale;  // a power of two: exact
    f.y *= Math::kProductScale;
    f.z *= Math::kProductScale;
    tables().factors[item] = f;
  }

  __device__ __forceinline__ void store_out(int token, int column, float value) {
    const bool fp16 = Recipe::kQuantized ? p.x_is_fp16 != 0 : Recipe::kFp16;
    static_cast<uint16_t*>(p.out)[static_cast<int64_t>(token) * p.hidden + column] =
        from_float(value, fp16);
  }

  static constexpr uint32_t kNanBits = 0x7FFFFFFF;
  static constexpr int kAtATime = 8;  // rows that a thread reads

  const MoeDecodeParams& p;
  char* const memory;
  const int lane;
  const bool owner;
};

}  // namespace b12x
