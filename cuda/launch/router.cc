#include "cuda/launch/router.h"

#include "cuda/kernels/sm90_router.h"
#include "cuda/moe/params.h"

namespace b12x {
namespace {

constexpr int kMultiprocessors = 132;  // of an H200; the tile depends on the shape alone

const char* refusal(const RouterParams& p) {
  if (p.num_tokens < 0) return "num_tokens must not be negative";
  if (p.hidden < 16 || p.hidden % 16 != 0) return "hidden must be a multiple of 16";
  if (p.num_experts < 1 || p.num_experts > kRouterMaxExperts) {
    return "num_experts must be between 1 and 1024";
  }
  if (p.top_k < 1 || p.top_k > kRouterMaxTopK || p.top_k > p.num_experts) {
    return "top_k must be between 1 and 16, and at most num_experts";
  }
  if (p.num_joined < 0 || p.top_k + p.num_joined > kRouterMaxTopK ||
      p.num_experts + p.num_joined > kRouterMaxExperts) {
    return "num_joined must not be negative, and with it top_k at most 16 and num_experts 1024";
  }
  if (p.num_groups < 1 || p.num_groups > kRouterMaxGroups || p.num_experts % p.num_groups != 0) {
    return "num_groups must be between 1 and 32 and divide num_experts";
  }
  if (p.topk_groups < 1 || p.topk_groups > p.num_groups ||
      p.top_k > p.topk_groups * (p.num_experts / p.num_groups)) {
    return "topk_groups must be between 1 and num_groups, and their experts top_k or more";
  }
  if (int64_t{p.num_tokens} > int64_t{kRouterTokenGroup} * 65535) return "num_tokens is too large";
  return nullptr;
}

// Experts of a CTA, as measured. One token: as few as fill the device once. More tokens: the more
// there are, the more it pays to read a token for several experts.
int expert_tile(const RouterParams& p) {
  if (p.num_tokens > 1) return p.num_tokens <= kRouterTokenGroup ? 2 : 4;
  int tile = 1;
  while (tile < kRouterMaxTile && CeilDiv(p.num_experts, tile) > kMultiprocessors) tile *= 2;
  return tile;
}

}  // namespace

LaunchStatus launch_router(const RouterParams& params, cudaStream_t stream) {
  if (const char* reason = refusal(params)) return {cudaErrorInvalidValue, reason};
  if (params.num_tokens == 0) return {};
  const bool many = params.num_tokens > 1;
  const int tile = expert_tile(params);
  const RouterKernel logits = router_logits_kernel(
      params.x_dtype == RouterDtype::kF32, params.weight_dtype == RouterDtype::kF32, many, tile);
  void* arguments[] = {const_cast<RouterParams*>(&params)};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(CeilDiv(params.num_experts, tile),
                        many ? CeilDiv(params.num_tokens, kRouterTokenGroup) : 1);
  config.blockDim = dim3(kRouterThreads);
  config.stream = stream;
  if (cudaError_t e =
          cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(logits), arguments)) {
    return {e, nullptr};
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(params.num_tokens);
  config.blockDim = dim3(CeilDiv(params.num_experts, 32) * 32);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return {cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(router_select_kernel()),
                              arguments),
          nullptr};
}

}  // namespace b12x
