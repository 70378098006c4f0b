// x, quantized to NVFP4 and kept as the bf16 numbers that it stands for.
#pragma once

#include <cstdint>

#include "cuda/formats/fp4_tile.cuh"
#include "cuda/moe/activation.cuh"
#include "cuda/moe/nvfp4_quantize.cuh"
#include "cuda/moe/params.h"
#include "cuda/moe/weight_stream.cuh"
#include "cuda/ptx/memory.cuh"

namespace b12x {

// 8 of a block's 16 numbers, as they are. Zero past the end.
__device__ __forceinline__ uint4 input_chunk(const MoeDecodeParams& p, int token, int chunk) {
  if (chunk * 8 >= p.hidden) return {0, 0, 0, 0};
  return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) +
                                         static_cast<int64_t>(token) * p.hidden + chunk * 8);
}

// The same, quantized; the others are in the neighbouring lane.
__device__ __forceinline__ uint4 quantized_chunk(const MoeDecodeParams& p, uint4 v,
                                                 float global_scale) {
  uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float x[8], amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = to_float(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)), p.x_is_fp16);
    amax = max_or_nan(amax, fabsf(x[i]));
  }
  amax = max_or_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  const Nvfp4Block block = Nvfp4Block::of(amax, global_scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = from_float(block.round(x[2 * i]), false) |
               uint32_t{from_float(block.round(x[2 * i + 1]), false)} << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// Quantizes chunks first, first + step, ... of x; `store` takes a chunk's token, its place in the
// row and its numbers. Run by whole warps: neighbouring threads have neighbouring chunks. Several
// loads are in flight at a time.
template <bool kOneToken, typename Store>
__device__ __forceinline__ void quantize_chunks(const MoeDecodeParams& p, int first, int step,
                                                const Store& store) {
  constexpr int kAtATime = kOneToken ? 2 : 3;
  const int chunks = p.plan.shape.fc1_k_tiles * (kTileColumns / 8);
  const int end = kOneToken ? chunks : p.num_tokens * chunks;
  const float global_scale = *p.w13_input;
  // Threads of a warp stay together: the first one's chunk decides.
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int begin = first; begin - lane < end; begin += kAtATime * step) {
    int token[kAtATime], chunk[kAtATime];
    uint4 v[kAtATime];
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      const int i = begin + k * step;
      token[k] = !kOneToken && i < end ? divide(i, chunks) : 0;
      chunk[k] = i - token[k] * chunks;
      v[k] = input_chunk(p, token[k], chunk[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      if (begin - lane + k * step >= end) break;
      v[k] = quantized_chunk(p, v[k], global_scale);
      if (begin + k * step < end) store(token[k], chunk[k], v[k]);
    }
  }
}

// All of a single token's x, to this CTA's shared memory. Run by all multiplying warps.
__device__ __forceinline__ void quantize_input_for_this_cta(const MoeDecodeParams& p,
                                                            uint32_t shared) {
  static_assert(kMoeSharedInputTokens == 1);
  quantize_chunks<true>(p, threadIdx.x, kMoeDecodeThreads, [&](int, int chunk, uint4 v) {
    ptx::store_shared_16(shared + chunk * 16, v);
  });
}

// This CTA's share of x, to global memory, by kThreads of its threads. Whoever reads it must wait
// for the whole grid.
template <int kThreads>
__device__ __forceinline__ void quantize_input_share(const MoeDecodeParams& p, int thread) {
  const int chunks = p.plan.shape.fc1_k_tiles * (kTileColumns / 8);
  quantize_chunks<false>(p, blockIdx.x * kThreads + thread, gridDim.x * kThreads,
                         [&](int token, int chunk, uint4 v) {
                           static_cast<uint4*>(p.input)[token * chunks + chunk] = v;
                         });
}

}  // namespace b12x
