// The compiled router kernels.
#pragma once

#include <cstdint>

#include "cuda/moe/router_params.h"

namespace b12x {

inline constexpr int kRouterThreads = 256;
inline constexpr int kRouterTokenGroup = 8;  // tokens of a CTA
inline constexpr int kRouterMaxTile = 8;     // experts of a CTA with one token

using RouterKernel = void (*)(RouterParams);

// A CTA has one token and 1, 2, 4 or 8 experts or, with `many_tokens`, a group of
// kRouterTokenGroup tokens and 2 or 4 experts.
RouterKernel router_logits_kernel(bool wide_x, bool wide_weight, bool many_tokens, int expert_tile);

// The choice, a CTA for each token, of a thread for each expert.
RouterKernel router_select_kernel();

}  // namespace b12x
