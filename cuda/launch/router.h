// Launches the router: plain pointers, shapes and a stream. Nothing here allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/status.h"
#include "cuda/moe/router_params.h"

namespace b12x {

// Computes logits and routes in two launches without a barrier in them; they may run beside
// anything. No scratch is needed.
LaunchStatus launch_router(const RouterParams& params, cudaStream_t stream);

}  // namespace b12x
