// A dense gated MLP on Hopper for few tokens: two launches without a barrier across the grid.
//
// A CTA multiplies one or two tiles of 16 rows, its warps a slice of the columns each, and adds the
// slices in order. The grid is as large as the matrix has tiles: small CTAs fill whatever room
// there is beside other work. The second launch starts while the first drains and requests its
// weights before it waits.
#include "cuda/kernels/sm90_dense_mlp.h"
#include "cuda/moe/activation.cuh"
#include "cuda/moe/row_product.cuh"
#include "cuda/ptx/launch_dependency.cuh"

namespace b12x {
namespace {

// Tiles for so many tokens, and the warps for which their registers suffice.
template <int kTokenTiles_>
struct DenseTile {
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kRowTiles = kTokenTiles <= 2 ? 1 : 2;
  static constexpr int kStages = 4;
  static constexpr int kMaxWarps = kTokenTiles <= 2 ? 16 : 8;
  template <bool kFp16>
  using Product = RowProduct<kFp16, kRowTiles, kTokenTiles, kStages>;
};

// One gate a token: sigmoid(x . shared_gate). Warps take turns at the tokens.
__device__ void shared_gates(const DenseMlpLaunch& launch) {
  const DenseMlpParams& p = launch.params;
  const int lane = threadIdx.x & 31;
  for (int token = threadIdx.x >> 5; token < p.num_tokens; token += blockDim.x >> 5) {
    const auto* x = static_cast<const uint16_t*>(p.x) + int64_t{token} * p.hidden;
    const auto* gate = static_cast<const uint16_t*>(p.shared_gate);
    float sum = 0.0f;
#pragma unroll 4
    for (int column = lane * 8; column < p.hidden; column += 256) {
      const uint4 a = ptx::load_16(x + column), b = ptx::load_16(gate + column);
      const uint32_t a_words[4] = {a.x, a.y, a.z, a.w}, b_words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int shift = i % 2 * 16;
        sum = __fmaf_rn(to_float(static_cast<uint16_t>(a_words[i / 2] >> shift), p.fp16),
                        to_float(static_cast<uint16_t>(b_words[i / 2] >> shift), p.fp16), sum);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, offset));
    }
    if (lane == 0) launch.gates[token] = sigmoid(sum);
  }
}

// h = activation(x * w13). A row tile is 8 gate rows and the 8 up rows that belong to them, so that
// both meet in one lane.
template <bool kFp16, typename Tile>
__global__ void __launch_bounds__(32 * Tile::kMaxWarps)
    sm90_dense_mlp_fc1(const __grid_constant__ DenseMlpLaunch launch) {
  extern __shared__ __align__(16) char shared[];
  const DenseMlpParams& p = launch.params;
  ptx::launch_dependents();
  const int first = blockIdx.x * Tile::kRowTiles * 8;
  if (first >= p.intermediate) {  // the last CTA, if there is a shared gate
    shared_gates(launch);
    return;
  }
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = (threadIdx.x & 31) >> 2;
  typename Tile::template Product<kFp16> product(shared, p.hidden, warp, warps);
  const auto* w13 = static_cast<const uint16_t*>(p.w13);
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
    const int64_t row = first + r * 8 + g;
    product.set_rows(r, w13 + row * p.hidden, w13 + (p.intermediate + row) * p.hidden);
  }
  product.start_weights();
  product.set_tokens(static_cast<const uint16_t*>(p.x), p.hidden, p.num_tokens);
  product.run();
  __syncthreads();
  constexpr int kRows = Tile::kRowTiles * 8;
  auto* h = static_cast<uint16_t*>(launch.h);
  for (int i = threadIdx.x; i < p.num_tokens * kRows; i += blockDim.x) {
    const int token = i / kRows, row = i % kRows;
    float gate = product.total(row / 8, row % 8, token);
    float up = product.total(row / 8, row % 8 + 8, token);
    if (p.w13_bias != nullptr) {
      gate = __fadd_rn(gate, p.w13_bias[first + row]);
      up = __fadd_rn(up, p.w13_bias[p.intermediate + first + row]);
    }
    h[int64_t{token} * p.intermediate + first + row] =
        from_float(activate(p.activation, p.alpha, p.limit, gate, up), kFp16);
  }
}

// out = h * w2.
template <bool kFp16, typename Tile>
__global__ void __launch_bounds__(32 * Tile::kMaxWarps)
    sm90_dense_mlp_fc2(const __grid_constant__ DenseMlpLaunch launch) {
  extern __shared__ __align__(16) char shared[];
  const DenseMlpParams& p = launch.params;
  const int first = blockIdx.x * Tile::kRowTiles * 16;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = (threadIdx.x & 31) >> 2;
  typename Tile::template Product<kFp16> product(shared, p.intermediate, warp, warps);
  const auto* w2 = static_cast<const uint16_t*>(p.w2);
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
    // The last CTA may have a tile less: it multiplies its first one twice.
    const int tile = first + r * 16 < p.hidden ? first + r * 16 : first;
    const uint16_t* const row = w2 + int64_t{tile + g} * p.intermediate;
    product.set_rows(r, row, row + int64_t{8} * p.intermediate);
  }
  product.start_weights();
  product.set_tokens(static_cast<const uint16_t*>(launch.h), p.intermediate, p.num_tokens);
  ptx::wait_for_prior_kernel();
  product.run();
  __syncthreads();
  constexpr int kRows = Tile::kRowTiles * 16;
  auto* out = static_cast<uint16_t*>(p.out);
  for (int i = threadIdx.x; i < p.num_tokens * kRows; i += blockDim.x) {
    const int token = i / kRows, row = i % kRows;
    if (first + row >= p.hidden) continue;
    float y = product.total(row / 16, row % 16, token);
    if (p.w2_bias != nullptr) y = __fadd_rn(y, p.w2_bias[first + row]);
    // Written by the launch before: not a load of the read-only cache.
    if (p.shared_gate != nullptr) y = __fmul_rn(y, __ldcg(launch.gates + token));
    out[int64_t{token} * p.hidden + first + row] = from_float(y, kFp16);
  }
}

template <int kTokenTiles>
DenseMlpProduct product(DenseMlpKernel kernel) {
  using Tile = DenseTile<kTokenTiles>;
  return {kernel, Tile::kRowTiles, Tile::kMaxWarps, Tile::template Product<false>::kWarpBytes};
}

template <int kTokenTiles>
DenseMlpProduct fc1(bool fp16) {
  return product<kTokenTiles>(fp16 ? sm90_dense_mlp_fc1<true, DenseTile<kTokenTiles>>
                                   : sm90_dense_mlp_fc1<false, DenseTile<kTokenTiles>>);
}

template <int kTokenTiles>
DenseMlpProduct fc2(bool fp16) {
  return product<kTokenTiles>(fp16 ? sm90_dense_mlp_fc2<true, DenseTile<kTokenTiles>>
                                   : sm90_dense_mlp_fc2<false, DenseTile<kTokenTiles>>);
}

}  // namespace

DenseMlpProduct dense_mlp_fc1(bool fp16, int32_t num_tokens) {
  if (num_tokens <= 8) return fc1<1>(fp16);
  if (num_tokens <= 16) return fc1<2>(fp16);
  return num_tokens <= 32 ? fc1<4>(fp16) : fc1<8>(fp16);
}

DenseMlpProduct dense_mlp_fc2(bool fp16, int32_t num_tokens) {
  if (num_tokens <= 8) return fc2<1>(fp16);
  if (num_tokens <= 16) return fc2<2>(fp16);
  return num_tokens <= 32 ? fc2<4>(fp16) : fc2<8>(fp16);
}

}  // namespace b12x
