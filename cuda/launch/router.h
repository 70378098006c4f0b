// Launches the router: plain pointers, shapes and a stream. Nothing here allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/status.h"
#include "cuda/moe/router_params.h"

namespace b12x {

// The scratch of a call; the workspace, where there is one, is no part of it.
int64_t router_scratch_bytes(int32_t num_tokens, int32_t hidden, int32_t num_experts,
                             int32_t top_k);

// The device words behind `RouterParams::workspace`: zeroed once by their owner, then left alone.
// Launches that share them follow one another. Every launch leaves them at zero.
int64_t router_workspace_bytes(int32_t num_tokens);

// Computes logits and routes. With `params.workspace` it is one launch, in which the last CTA of a
// group of tokens chooses their experts; without, two launches. Both give the same bits.
LaunchStatus launch_router(const RouterParams& params, void* scratch, int64_t scratch_bytes,
                           cudaStream_t stream);

}  // namespace b12x
