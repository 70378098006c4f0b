// `b12x_router` on the `CUDA` platform: decodes and checks a call, launches.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "cuda/launch/router.h"
#include "ffi/handlers/families.h"
#include "ffi/handlers/launched.h"
#include "ffi/handlers/router_call.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error RouterCuda(cudaStream_t stream, xffi::AnyBuffer x, xffi::AnyBuffer weight,
                       xffi::AnyBuffer bias, xffi::AnyBuffer token_mask,
                       xffi::Result<xffi::AnyBuffer> topk_ids,
                       xffi::Result<xffi::AnyBuffer> topk_weights,
                       xffi::Result<xffi::AnyBuffer> logits,
                       xffi::ResultBuffer<xffi::U8> /*scratch*/, std::string_view scoring,
                       bool renormalize, float scale, int64_t num_groups, int64_t topk_groups,
                       int64_t num_joined) {
  RouterBuffers buffers{x, weight, bias, token_mask, topk_ids, topk_weights, logits};
  RouterParams params;
  xffi::Error error = ReadRouterCall(
      buffers, {scoring, renormalize, scale, num_groups, topk_groups, num_joined}, &params);
  if (error.failure()) return error;
  return Launched(launch_router(params, stream), "b12x_router on CUDA");
}

XLA_FFI_DEFINE_HANDLER(kRouterCuda, RouterCuda,
                       BindRouter(xffi::Ffi::Bind().Ctx<xffi::PlatformStream<cudaStream_t>>()),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterRouterCuda(Registry& registry) {
  Stages stages;
  stages.execute = kRouterCuda;
  registry.AddTarget("b12x_router", stages);
}

}  // namespace b12x::ffi
