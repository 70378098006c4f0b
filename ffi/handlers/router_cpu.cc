// `b12x_router` on the `cpu` platform: decodes and checks a call, runs the host code.
#include <cstdint>
#include <string_view>

#include "ffi/handlers/families.h"
#include "ffi/handlers/host_executor.h"
#include "ffi/handlers/router_call.h"
#include "ffi/host/router.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error RouterCpu(xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer weight,
                      xffi::AnyBuffer bias, xffi::AnyBuffer token_mask,
                      xffi::Result<xffi::AnyBuffer> topk_ids,
                      xffi::Result<xffi::AnyBuffer> topk_weights,
                      xffi::Result<xffi::AnyBuffer> logits, xffi::ResultBuffer<xffi::U8> scratch,
                      std::string_view scoring, bool renormalize, float scale, int64_t num_groups,
                      int64_t topk_groups, int64_t num_joined) {
  RouterBuffers buffers{x, weight, bias, token_mask, topk_ids, topk_weights, logits};
  host::RouterProblem problem;
  xffi::Error error = ReadRouterCall(
      buffers, {scoring, renormalize, scale, num_groups, topk_groups, num_joined}, &problem);
  if (error.failure()) return error;
  problem.scratch = scratch->typed_data();
  if (static_cast<int64_t>(scratch->size_bytes()) < host::RouterScratchBytes(problem)) {
    return xffi::Error::InvalidArgument("b12x_router on cpu: scratch is too small");
  }
  host::RunRouter(problem, ExecutorOf(pool));
  return xffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kRouterCpu, RouterCpu,
                       BindRouter(xffi::Ffi::Bind().Ctx<xffi::ThreadPool>()));

}  // namespace

void RegisterRouterCpu(Registry& registry) {
  Stages stages;
  stages.execute = kRouterCpu;
  registry.AddTarget("b12x_router", stages);
}

}  // namespace b12x::ffi
