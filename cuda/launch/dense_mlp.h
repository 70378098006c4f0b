// Launches a dense gated MLP, as a shared expert is one: plain pointers, shapes and a stream.
// Nothing here allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/status.h"
#include "cuda/moe/dense_mlp_params.h"

namespace b12x {

// The scratch of a call: h and the gates of up to 64 tokens.
int64_t dense_mlp_scratch_bytes(int32_t num_tokens, int32_t hidden, int32_t intermediate);

// Runs two launches without a barrier in them, for each 64 tokens; they may run beside anything.
LaunchStatus launch_dense_mlp(const DenseMlpParams& params, void* scratch, int64_t scratch_bytes,
                              cudaStream_t stream);

}  // namespace b12x
