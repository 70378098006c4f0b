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

// 8 of a block's 16 numbers, quantized; the others are in the neighbouring lane. Zero past the
// end.
__device__ __forceinline__ uint4 quantized_chunk(const MoeDecodeParams& p, int token, int chunk) {
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
  const Nvfp4Block block = Nvfp4Block::of(amax, global_scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = from_float(block.round(x[2 * i]), false) |
               uint32_t{from_float(block.round(x[2 * i + 1]), false)} << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// All of x, to this CTA's shared memory. Run by all multiplying warps.
__device__ __forceinline__ void quantize_input_for_this_cta(const MoeDecodeParams& p,
                                                            uint32_t shared) {
  const int chunks = p.plan.shape.fc1_k_tiles * (kTileColumns / 8);
  const int total = p.num_tokens * chunks;
#pragma unroll 1
  for (int first = 0; first < total; first += kMoeDecodeThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int token = divide(i, chunks), chunk = i - token * chunks;
    const uint4 v = quantized_chunk(p, i < total ? token : 0, chunk);
    if (i < total) {
      ptx::store_shared_16(shared + token * p.plan.shared.input_row_bytes + chunk * 16, v);
    }
  }
}

// This CTA's share of x, to global memory, by kThreads of its threads. Whoever reads it must wait
// for the whole grid.
template <int kThreads>
__device__ __forceinline__ void quantize_input_share(const MoeDecodeParams& p, int thread) {
  const int chunks = p.plan.shape.fc1_k_tiles * (kTileColumns / 8);
  const int total = p.num_tokens * chunks;
#pragma unroll 1
  for (int first = blockIdx.x * kThreads; first < total; first += gridDim.x * kThreads) {
    const int i = first + thread;
    const int token = divide(i, chunks), chunk = i - token * chunks;
    const uint4 v = quantized_chunk(p, i < total ? token : 0, chunk);
    if (i < total) static_cast<uint4*>(p.input)[i] = v;
  }
}

}  // namespace b12x
