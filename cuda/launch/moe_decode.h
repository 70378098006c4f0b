// Launches MoE decode: plain pointers, shapes and a stream. Nothing here allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/launch/status.h"
#include "cuda/moe/params.h"

namespace b12x {

enum class DecodeLaunch { kFused, kSplit };

// What sees to it that all CTAs of a fused launch are on the GPU at once.
enum class DecodeResidency {
  kCooperative,  // the driver: a grid that does not fit is refused, one that has to wait waits
  // Nothing. For tests of the barrier's own bound: a grid that is not resident fails, with NaN.
  kUnchecked,
};

// Scratch for a call of `num_tokens` tokens: h, then y and the quantized x where there are any.
struct MoeDecodeScratch {
  int64_t h_bytes;
  int64_t y_bytes;
  int64_t input_bytes;
  int64_t bytes() const { return h_bytes + y_bytes + input_bytes; }
};
MoeDecodeScratch moe_decode_scratch(int32_t num_tokens, int32_t top_k, int32_t hidden,
                                    int32_t intermediate, bool quantized,
                                    const MoeDecodeGeometry& geometry);

// Runs one MoE layer; `params.plan` and the pointers into `scratch` are filled in here. More than
// 64 tokens run as launches of 64 after one another, over the same scratch. A fused launch whose
// grid barrier fails writes NaN for every token.
LaunchStatus launch_moe_decode(MoeDecodeParams params, DecodeRecipeId recipe, DecodeLaunch launch,
                               void* scratch, int64_t scratch_bytes, cudaStream_t stream,
                               DecodeResidency residency = DecodeResidency::kCooperative);

}  // namespace b12x
