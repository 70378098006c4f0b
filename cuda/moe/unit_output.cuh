// What becomes of a unit's sums: activation, scales, biases.
//
// A unit's sums are 16 rows x up to 8 tokens; lane 4 g + t has rows g and g + 8 (acc[0..1] and
// acc[2..3]) of tokens 2 t and 2 t + 1. What belongs to an item is kept from unit to unit.
#pragma once

#include <cstdint>

#include "cuda/formats/fp4_tile.cuh"
#include "cuda/moe/activation.cuh"
#include "cuda/moe/nvfp4_quantize.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/work_list.cuh"

namespace b12x {

// The first product: 8 gates and the 8 ups of the same columns -> h. Two row tiles are a block of
// the quantized intermediate.
template <typename Recipe>
class IntermediateOutput {
  using Math = typename Recipe::Math;

 public:
  static constexpr int kRun = Recipe::kQuantized ? 2 : 1;  // neighbouring units at a time

  __device__ __forceinline__ IntermediateOutput(const MoeDecodeParams& params,
                                                const WorkTables& tables, int lane)
      : p(params), tables_(tables), g_(lane >> 2), t_(lane & 3) {}

  // To be called before store(): what does not need the sums.
  __device__ __forceinline__ void prepare(int item, int /*row_tile*/) {
    if (item != item_) turn_to(item);
  }

  __device__ __forceinline__ void store(int /*item*/, int row_tile, float (&acc)[kRun][4]) {
    float h[kRun][2] = {};
#pragma unroll
    for (int tile = 0; tile < kRun; ++tile) activate_tile(row_tile + tile, acc[tile], h[tile]);
    uint16_t* out = out_ + row_tile * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i > 0 && rows_ == 1) break;
      if constexpr (Recipe::kQuantized) quantize(h[0][i], h[1][i]);
      if (2 * t_ + i >= rows_) continue;
#pragma unroll
      for (int tile = 0; tile < kRun; ++tile) {
        out[i * width() + tile * 8] = from_float(h[tile][i], Recipe::kFp16);
      }
    }
    if (row_tile + kRun == p.plan.shape.fc1_row_tiles) clear_padding();
  }

 private:
  __device__ __forceinline__ int width() const { return p.plan.shape.fc2_k_tiles * kTileColumns; }

  __device__ __forceinline__ void turn_to(int item) {
    item_ = item;
    const WorkItem work = WorkItem::unpack(tables_.items[item]);
    expert_ = work.expert;
    rows_ = work.rows;
    factors_ = tables_.factors[item];
    out_ =
        static_cast<uint16_t*>(p.h) + static_cast<int64_t>(work.first_row + 2 * t_) * width() + g_;
  }

  __device__ __forceinline__ void activate_tile(int row_tile, float (&acc)[4], float (&h)[2]) {
    if (rows_ == 1) Math::collapse(acc);
    const int column = row_tile * 8 + g_;
    float gate_bias = 0.0f, up_bias = 0.0f;
    if (p.w13_bias != nullptr && column < p.intermediate) {
      const float* bias = p.w13_bias + static_cast<int64_t>(expert_) * 2 * p.intermediate + column;
      gate_bias = bias[0];
      up_bias = bias[p.intermediate];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i > 0 && rows_ == 1) break;
      h[i] = activate(p.activation, p.alpha, p.limit,
                      __fadd_rn(__fmul_rn(acc[i], factors_.x), gate_bias),
                      __fadd_rn(__fmul_rn(acc[2 + i], factors_.y), up_bias));
    }
  }

  // A lane's two numbers of a block; lanes of the same t have the rest of it.
  __device__ __forceinline__ void quantize(float& first, float& second) const {
    float amax = max_or_nan(fabsf(first), fabsf(second));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    }
    const Nvfp4Block block = Nvfp4Block::of(amax, factors_.w);
    first = block.round(first);
    second = block.round(second);
  }

  // The padding of h meets weights that are zero, and must not be a NaN.
  __device__ __forceinline__ void clear_padding() const {
    const int begin = p.plan.shape.fc1_row_tiles * 8;
    for (int i = 0; i < 2; ++i) {
      if (2 * t_ + i >= rows_) break;
#pragma unroll 1
      for (int column = begin; column < width(); column += 8) out_[i * width() + column] = 0;
    }
  }

  const MoeDecodeParams& p;
  const WorkTables tables_;
  const int g_, t_;
  int item_ = -1, expert_ = 0, rows_ = 0;
  float4 factors_{};
  uint16_t* out_ = nullptr;  // row of token 2 t, column g
};

// The second product -> rows of y: in shared memory where a CTA owns output columns.
template <typename Recipe>
class RowOutput {
  using Math = typename Recipe::Math;

 public:
  static constexpr int kRun = 1;

  // `owned`: the CTA's y, or null where rows go to p.y.
  __device__ __forceinline__ RowOutput(const MoeDecodeParams& params, const WorkTables& tables,
                                       float* owned, int lane)
      : p(params), tables_(tables), owned_(owned), g_(lane >> 2), t_(lane & 3) {}

  // A unit of Fc2Order::kOwner is (owned row tile, item), else (item, row tile). To be called
  // before store(): what does not need the sums.
  __device__ __forceinline__ void prepare(int major, int minor) {
    const int item = p.geometry.fc2_order == Fc2Order::kOwner ? minor : major;
    if (item != item_) turn_to(item);
  }

  __device__ __forceinline__ void store(int major, int minor, float (&acc)[1][4]) {
    const bool owner = p.geometry.fc2_order == Fc2Order::kOwner;
    if (rows_ == 1) Math::collapse(acc[0]);
    const int row_tile = owner ? static_cast<int>(blockIdx.x + major * gridDim.x) : minor;
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(acc[0][i], factor_);
    if (p.w2_bias != nullptr) add_bias(y, row_tile * 16 + g_);
    if (owner) {
      store_rows(owned_ + (major * p.num_tokens * p.top_k + row_) * 16 + g_, 16, y);
    } else {
      const int columns = p.plan.shape.fc2_row_tiles * 16;
      store_rows(p.y + static_cast<int64_t>(row_) * columns + row_tile * 16 + g_, columns, y);
    }
  }

 private:
  __device__ __forceinline__ void turn_to(int item) {
    item_ = item;
    const WorkItem work = WorkItem::unpack(tables_.items[item]);
    expert_ = work.expert;
    rows_ = work.rows;
    row_ = work.first_row + 2 * t_;
    factor_ = tables_.factors[item].z;
  }

  __device__ __forceinline__ void add_bias(float (&y)[4], int column) const {
    const float* bias = p.w2_bias + static_cast<int64_t>(expert_) * p.hidden;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = column + i / 2 * 8;
      if (at < p.hidden) y[i] = __fadd_rn(y[i], bias[at]);
    }
  }

  __device__ __forceinline__ void store_rows(float* to, int stride, const float (&y)[4]) const {
    if (2 * t_ < rows_) {
      to[0] = y[0];
      to[8] = y[2];
    }
    if (2 * t_ + 1 < rows_) {
      to[stride] = y[1];
      to[stride + 8] = y[3];
    }
  }

  const MoeDecodeParams& p;
  const WorkTables tables_;
  float* const owned_;
  const int g_, t_;
  int item_ = -1, expert_ = 0, rows_ = 0, row_ = 0;  // row_: of token 2 t
  float factor_ = 0.0f;
};

}  // namespace b12x
