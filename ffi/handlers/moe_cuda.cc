// `b12x_moe` on the `CUDA` platform: decodes operands and attributes, checks them, launches.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>

#include "ffi/handlers/families.h"
#include "ffi/handlers/moe_call_cuda.h"
#include "ffi/handlers/workspace_call.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error MoeCuda(WorkspaceCall* workspace, int32_t device, cudaStream_t stream,
                    xffi::RemainingArgs args, xffi::RemainingRets rets,
                    xffi::Dictionary dictionary) {
  MoeBuffers buffers;
  if (xffi::Error error = ReadMoeBuffers(args, rets, &buffers); error.failure()) return error;
  MoeCall call;
  if (xffi::Error error = ReadMoeCall(dictionary, buffers, &call); error.failure()) return error;
  try {
    UseBarrier(WorkspaceOn(*workspace, device), 0, &call);
  } catch (const std::exception& error) {
    return xffi::Error(xffi::ErrorCode::kFailedPrecondition, error.what());
  }
  return LaunchMoe(call, stream);
}

XLA_FFI_DEFINE_HANDLER(kMoeCuda, MoeCuda, BindCudaExecute(), {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterMoeCuda(Registry& registry) {
  registry.AddType<WorkspaceCall>("b12x_workspace_call");
  registry.AddTarget("b12x_moe", CudaWorkspaceStages(kMoeCuda));
}

}  // namespace b12x::ffi
