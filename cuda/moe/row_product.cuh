// Rows of a plain 16-bit matrix times a few tokens, at the speed of reading the rows once.
//
// Rows are the MMA's A operand, tokens its N side. Lane 4 g + t loads 8 neighbouring columns of
// rows g and g + 8, and the same columns of token g: the four words of a load are k 2t, 2t + 1 (and
// + 8) of two MMAs. An MMA does not care which column of the matrix its k stands for, as long as
// both operands agree, so nothing has to be rearranged.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"

namespace b12x {

inline constexpr int kProductColumns = 32;  // of one step
inline constexpr int kProductTokens = 8;    // of one MMA

// One warp's share of a product: 16 kRowTiles rows, a slice of the columns, 8 kTokenTiles tokens.
// kStages steps of weights are in flight.
template <bool kFp16, int kRowTiles, int kTokenTiles, int kStages>
class RowProduct {
  static_assert(kRowTiles >= 1 && kTokenTiles >= 1 && kStages >= 1, "sizes");
  // Activations come from L2 as late as weights come from memory, if they are requested late. For
  // one tile of tokens there are registers to request both together.
  static constexpr bool kStagedTokens = kTokenTiles == 1;

 public:
  // The warp takes slice `slice` of `slices` of the steps over `columns`, a multiple of 16.
  __device__ __forceinline__ RowProduct(int columns, int slice, int slices)
      : policy_(ptx::evict_first_policy()) {
    const int steps = (columns + kProductColumns - 1) / kProductColumns;
    const int begin = slice * steps / slices;
    const int end = (slice + 1) * steps / slices;
    column_ = begin * kProductColumns + (threadIdx.x & 3) * 8;
    end_ = min(end * kProductColumns, columns);
    steps_ = end - begin;
  }

  // Gives a row tile: the lane's rows g and g + 8 of it.
  __device__ __forceinline__ void set_rows(int tile, const uint16_t* low, const uint16_t* high) {
    rows_[tile][0] = low;
    rows_[tile][1] = high;
  }

  // Gives the tokens: dense rows of `columns`. A lane without one takes the last token's, and what
  // its column of the product holds means nothing.
  __device__ __forceinline__ void set_tokens(const uint16_t* tokens, int64_t columns,
                                             int num_tokens) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      tokens_[n] = tokens + min(n * kProductTokens + g, num_tokens - 1) * columns;
    }
  }

  // Requests the first weights.
  __device__ __forceinline__ void start_weights() {
#pragma unroll
    for (int s = 0; s < kStages; ++s) load_weights(s, column_ + s * kProductColumns);
  }

  // Multiplies; start_weights() has been called, and the tokens are there.
  __device__ __forceinline__ void run(float (&sums)[kRowTiles][kTokenTiles][4]) {
    if constexpr (kStagedTokens) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) load_tokens(b_[s], column_ + s * kProductColumns);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[r][n][i] = 0.0f;
      }
    }
    for (int step = 0; step < steps_; step += kStages) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        if (step + s < steps_) {
          if constexpr (!kStagedTokens) load_tokens(b_[0], column_);
          multiply(s, sums);
          const int next = column_ + kStages * kProductColumns;
          load_weights(s, next);
          if constexpr (kStagedTokens) load_tokens(b_[s], next);
          column_ += kProductColumns;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void load_weights(int stage, int column) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a_[stage][r][half] = ptx::load_weights_16(rows_[r][half] + column, column < end_, policy_);
      }
    }
  }

  __device__ __forceinline__ void load_tokens(uint4 (&b)[kTokenTiles], int column) {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      b[n] = column < end_ ? ptx::load_16(tokens_[n] + column) : uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void multiply(int stage, float (&sums)[kRowTiles][kTokenTiles][4]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const uint4 low = a_[stage][r][0], high = a_[stage][r][1];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const uint4 b = b_[kStagedTokens ? stage : 0][n];
        ptx::mma_m16n8k16<kFp16>(sums[r][n], low.x, high.x, low.y, high.y, b.x, b.y);
        ptx::mma_m16n8k16<kFp16>(sums[r][n], low.z, high.z, low.w, high.w, b.z, b.w);
      }
    }
  }

  uint64_t policy_;
  const uint16_t* rows_[kRowTiles][2];
  const uint16_t* tokens_[kTokenTiles];
  uint4 a_[kStages][kRowTiles][2];
  uint4 b_[kStagedTokens ? kStages : 1][kTokenTiles];
  int column_, end_, steps_;
};

// The partial sums of a CTA's warps, in shared memory, and their total in the order of the columns.
template <int kRowTiles, int kTokenTiles>
class PartialSums {
 public:
  static constexpr int bytes(int warps) { return warps * kWarpFloats * 4; }

  __device__ __forceinline__ PartialSums(float* memory, int warps)
      : memory_(memory), warps_(warps) {}

  __device__ __forceinline__ void store(int warp,
                                        const float (&sums)[kRowTiles][kTokenTiles][4]) const {
    float4* const at = reinterpret_cast<float4*>(memory_ + warp * kWarpFloats) + (threadIdx.x & 31);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        at[(r * kTokenTiles + n) * 32] =
            make_float4(sums[r][n][0], sums[r][n][1], sums[r][n][2], sums[r][n][3]);
      }
    }
  }

  // The total of row `row` (0 to 15) of a row tile for a token.
  __device__ __forceinline__ float total(int row_tile, int row, int token) const {
    const int column = token % kProductTokens;
    const int lane = row % 8 * 4 + column / 2;
    const float* at = memory_ + (row_tile * kTokenTiles + token / kProductTokens) * 128 + lane * 4 +
                      row / 8 * 2 + column % 2;
    float sum = 0.0f;
    for (int warp = 0; warp < warps_; ++warp) sum = __fadd_rn(sum, at[warp * kWarpFloats]);
    return sum;
  }

 private:
  static constexpr int kWarpFloats = kRowTiles * kTokenTiles * 128;
  float* memory_;
  int warps_;
};

}  // namespace b12x
