// Rows of a plain 16-bit matrix times a few tokens, at the speed of reading the rows once.
//
// Rows are the MMA's A operand, tokens its N side. Lane 4 g + t copies 8 neighbouring columns of
// rows g and g + 8, and the same columns of token g: the four words of a copy are k 2t, 2t + 1 (and
// + 8) of two MMAs. An MMA does not care which column of the matrix its k stands for, as long as
// both operands agree, so nothing has to be rearranged. A lane reads from shared memory what it has
// copied there itself: the ring stands in for registers, of which so many loads in flight would
// take too many.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"

namespace b12x {

inline constexpr int kProductColumns = 32;  // of one step
inline constexpr int kProductTokens = 8;    // of one MMA

// One warp's share of a product: 16 kRowTiles rows, a slice of the columns, 8 kTokenTiles tokens.
// kStages - 1 steps of weights are in flight.
template <bool kFp16, int kRowTiles, int kTokenTiles, int kStages>
class RowProduct {
  static_assert(kRowTiles >= 1 && kTokenTiles >= 1 && kStages >= 2, "sizes");
  static constexpr int kCopy = 32 * 16;  // bytes of a copy by the whole warp
  // One tile of tokens goes through the ring, more of them through registers: that much shared
  // memory is not worth it.
  static constexpr bool kStagedTokens = kTokenTiles == 1;
  static constexpr int kWeightBytes = kRowTiles * 2 * kCopy;
  static constexpr int kStageBytes = kWeightBytes + (kStagedTokens ? kCopy : 0);
  static constexpr int kPartialBytes = kRowTiles * kTokenTiles * kCopy;

 public:
  // Shared memory of a warp: its ring and, when it has multiplied, its sums.
  static constexpr int kWarpBytes =
      kStages * kStageBytes > kPartialBytes ? kStages * kStageBytes : kPartialBytes;

  // The warp takes slice `warp` of `warps` of the steps over `columns`, a multiple of 16.
  __device__ __forceinline__ RowProduct(char* shared, int columns, int warp, int warps)
      : shared_(shared), warps_(warps), policy_(ptx::evict_first_policy()) {
    const int lane = threadIdx.x & 31;
    const int steps = (columns + kProductColumns - 1) / kProductColumns;
    const int begin = warp * steps / warps;
    steps_ = (warp + 1) * steps / warps - begin;
    column_ = begin * kProductColumns + (lane & 3) * 8;
    end_ = min((begin + steps_) * kProductColumns, columns);
    ring_ = ptx::smem_address(shared) + warp * kWarpBytes + lane * 16;
  }

  // Gives a row tile: the lane's rows g and g + 8 of it.
  __device__ __forceinline__ void set_rows(int tile, const uint16_t* low, const uint16_t* high) {
    rows_[tile][0] = low + column_;
    rows_[tile][1] = high + column_;
  }

  // Gives the tokens: dense rows of `columns`. What a lane without one multiplies is left to
  // chance: its column of the product means nothing. It copies nothing either: copies of one
  // address to several places take turns.
  __device__ __forceinline__ void set_tokens(const uint16_t* tokens, int64_t columns,
                                             int num_tokens) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      tokens_[n] = tokens + min(n * kProductTokens + g, num_tokens - 1) * columns + column_;
    }
    has_token_ = g < num_tokens;
  }

  // Requests the first weights.
  __device__ __forceinline__ void start_weights() {
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      copy_weights(ring_ + s * kStageBytes, s);
      ptx::commit_copies();
    }
  }

  // Multiplies; start_weights() has been called, and the tokens are there. Leaves the sums in
  // shared memory for total(), after a barrier of the CTA.
  __device__ __forceinline__ void run() {
    if constexpr (kStagedTokens) {
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        copy_tokens(ring_ + s * kStageBytes, s);
        ptx::commit_copies();
      }
    }
    float sums[kRowTiles][kTokenTiles][4] = {};
    uint4 next[kTokenTiles];
    if constexpr (!kStagedTokens) load_tokens(next, 0);
    int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
    for (int step = 0; step < steps_; ++step) {
      ptx::wait_for_copies<kStages - 2>();
      // The stage that the step before has read.
      const uint32_t target = ring_ + free_stage * kStageBytes;
      copy_weights(target, step + kStages - 1);
      if constexpr (kStagedTokens) copy_tokens(target, step + kStages - 1);
      ptx::commit_copies();
      uint4 b[kTokenTiles];
      const uint32_t at = ring_ + stage * kStageBytes;
      if constexpr (kStagedTokens) {
        b[0] = ptx::load_shared_16(at + kWeightBytes);
      } else {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) b[n] = next[n];
        load_tokens(next, step + 1);
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint4 low = ptx::load_shared_16(at + 2 * r * kCopy);
        const uint4 high = ptx::load_shared_16(at + (2 * r + 1) * kCopy);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          ptx::mma_m16n8k16<kFp16>(sums[r][n], low.x, high.x, low.y, high.y, b[n].x, b[n].y);
          ptx::mma_m16n8k16<kFp16>(sums[r][n], low.z, high.z, low.w, high.w, b[n].z, b[n].w);
        }
      }
      free_stage = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // The sums take the ring's place: every lane has read, and no copy is under way.
    ptx::wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        ptx::store_shared_16(ring_ + (r * kTokenTiles + n) * kCopy,
                             {__float_as_uint(sums[r][n][0]), __float_as_uint(sums[r][n][1]),
                              __float_as_uint(sums[r][n][2]), __float_as_uint(sums[r][n][3])});
      }
    }
  }

  // The sum over all warps, in the order of the columns, of row `row` (0 to 15) of a row tile for a
  // token.
  __device__ __forceinline__ float total(int row_tile, int row, int token) const {
    const int column = token % kProductTokens;
    const int lane = row % 8 * 4 + column / 2;
    const int at = (row_tile * kTokenTiles + token / kProductTokens) * kCopy + lane * 16 +
                   (row / 8 * 2 + column % 2) * 4;
    float sum = 0.0f;
    for (int warp = 0; warp < warps_; ++warp) {
      sum = __fadd_rn(sum, *reinterpret_cast<const float*>(shared_ + warp * kWarpBytes + at));
    }
    return sum;
  }

 private:
  // `step` counts from the warp's first.
  __device__ __forceinline__ bool exists(int step) const {
    return column_ + step * kProductColumns < end_;
  }

  __device__ __forceinline__ void copy_weights(uint32_t to, int step) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::copy_weights_16(to + (2 * r + half) * kCopy, rows_[r][half] + step * kProductColumns,
                             exists(step), policy_);
      }
    }
  }

  __device__ __forceinline__ void copy_tokens(uint32_t to, int step) const {
    if (!has_token_) return;
    ptx::copy_16(to + kWeightBytes, tokens_[0] + step * kProductColumns, exists(step));
  }

  __device__ __forceinline__ void load_tokens(uint4 (&b)[kTokenTiles], int step) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      b[n] = exists(step) ? ptx::load_16(tokens_[n] + step * kProductColumns) : uint4{0, 0, 0, 0};
    }
  }

  const char* shared_;
  int warps_;
  uint64_t policy_;
  const uint16_t* rows_[kRowTiles][2];
  const uint16_t* tokens_[kTokenTiles];
  int column_, end_, steps_;
  bool has_token_;
  uint32_t ring_;
};

}  // namespace b12x
