// `b12x_moe` on the `cpu` platform: decodes operands and attributes, checks them, runs the host
// kernels. Python has checked the same before; a program that was stored and is run elsewhere has
// only this.
#include "ffi/handlers/families.h"
#include "ffi/handlers/host_executor.h"
#include "ffi/handlers/moe_call_cpu.h"
#include "ffi/handlers/workspace_call.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error MoeCpu(WorkspaceCall* workspace, int32_t device, xffi::ThreadPool pool,
                   xffi::RemainingArgs args, xffi::RemainingRets rets,
                   xffi::Dictionary dictionary) {
  if (xffi::Error error = PrepareWorkspace(workspace, device, nullptr); error.failure())
    return error;
  MoeBuffers buffers;
  if (xffi::Error error = ReadMoeBuffers(args, rets, &buffers); error.failure()) return error;
  host::MoeProblem problem;
  if (xffi::Error error = ReadMoeCall(dictionary, buffers, &problem); error.failure()) return error;
  host::RunMoe(problem, ExecutorOf(pool));
  return xffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMoeCpu, MoeCpu, BindHostExecute());

}  // namespace

void RegisterMoeCpu(Registry& registry) {
  registry.AddType<WorkspaceCall>("b12x_workspace_call");
  registry.AddTarget("b12x_moe", WorkspaceStages(kMoeCpu));
}

}  // namespace b12x::ffi
