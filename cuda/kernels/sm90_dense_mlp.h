// The compiled dense MLP kernels, by dtype and number of tokens.
#pragma once

#include <cstdint>

#include "cuda/moe/dense_mlp_params.h"

namespace b12x {

struct DenseMlpLaunch {
  DenseMlpParams params;
  void* h;       // T[num_tokens, intermediate]
  float* gates;  // [num_tokens], where there is a shared_gate
};

using DenseMlpKernel = void (*)(DenseMlpLaunch);

// A kernel and what its launch needs to know.
struct DenseMlpProduct {
  DenseMlpKernel kernel = nullptr;
  int32_t row_tiles = 0;       // of 16 weight rows each, that one CTA multiplies
  int32_t max_warps = 0;       // that may share the columns
  int32_t bytes_per_warp = 0;  // of shared memory
};

DenseMlpProduct dense_mlp_fc1(bool fp16, int32_t num_tokens);
DenseMlpProduct dense_mlp_fc2(bool fp16, int32_t num_tokens);

}  // namespace b12x
