// `b12x_moe_block` on the `CUDA` platform: decodes and checks a call, launches it in the order of
// its plan, on XLA's stream and the auxiliary one of its workspace.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "cuda/kernels/add.h"
#include "cuda/launch/dense_mlp.h"
#include "cuda/launch/router.h"
#include "ffi/handlers/block_call.h"
#include "ffi/handlers/families.h"
#include "ffi/handlers/launched.h"
#include "ffi/handlers/moe_call_cuda.h"
#include "ffi/handlers/workspace_call.h"
#include "ffi/runtime/captured_graph.h"
#include "ffi/runtime/launch_log.h"
#include "ffi/runtime/workspace_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;
using xffi::Error;

// A block, decoded and checked.
struct BlockLaunch {
  RouterParams router;
  MoeCall routed;
  MoeCall shared;
  DenseMlpParams dense;
};

Error Refuse(const std::string& message) {
  return Error::InvalidArgument("b12x_moe_block on CUDA: " + message);
}

Error ReadDense(BlockCall& call, bool fp16, DenseMlpParams* dense) {
  dense->fp16 = fp16;
  dense->alpha = call.dense_alpha;
  dense->limit = call.dense_limit;
  Error error = ReadActivation(call.dense_activation, &dense->activation);
  if (error.success()) error = ReadDenseMlpBuffers(*call.dense, dense);
  return error;
}

Error ReadLaunch(BlockCall& call, const runtime::CudaWorkspace* workspace, BlockLaunch* launch) {
  Error error = ReadMoeCall(call.routed_attributes, call.routed, &launch->routed);
  if (error.success() && call.shared_experts.has_value()) {
    error = ReadMoeCall(call.shared_attributes, *call.shared_experts, &launch->shared);
  }
  if (error.success() && call.dense.has_value()) {
    error = ReadDense(call, launch->routed.params.x_is_fp16 != 0, &launch->dense);
  }
  if (error.success() && call.router.has_value()) {
    error = ReadRouterCall(*call.router, call.router_attributes, &launch->router);
  }
  if (error.failure()) return error;
  UseBarrier(workspace, kRoutedBarrierOffset, &launch->routed);
  UseBarrier(workspace, kSharedBarrierOffset, &launch->shared);
  const bool forks = call.program.shared && call.program.order != BlockOrder::kSerial;
  if (forks && (workspace == nullptr || workspace->aux_stream(false) == nullptr)) {
    return Refuse("it forks, and its workspace has no stream");
  }
  const auto& params = launch->routed.params;
  if (call.out->element_count() != static_cast<size_t>(params.num_tokens) * params.hidden) {
    return Refuse("out must be like x");
  }
  return error;
}

class CudaSink : public LaunchSink {
 public:
  CudaSink(const BlockCall& call, const BlockLaunch& launch,
           const runtime::CudaWorkspace* workspace, cudaStream_t main)
      : call_(call), launch_(launch), workspace_(workspace), main_(main) {}

  Error Fork() override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(main_, &status);
    if (error != cudaSuccess) return Launched({error, nullptr}, "b12x_moe_block on CUDA, fork");
    aux_ = workspace_->aux_stream(status == cudaStreamCaptureStatusActive);
    return Wait(main_, workspace_->fork_event(), aux_, "fork");
  }
  Error Join() override { return Wait(aux_, workspace_->join_event(), main_, "join"); }
  Error Router() override {
    return Launched(launch_router(launch_.router, main_), "b12x_moe_block on CUDA, router");
  }
  Error Routed() override { return LaunchMoe(launch_.routed, main_); }
  Error Shared(BlockStream stream) override {
    const cudaStream_t on = stream == BlockStream::kAux ? aux_ : main_;
    if (!call_.dense.has_value()) return LaunchMoe(launch_.shared, on);
    const xffi::AnyBuffer& scratch = *call_.dense_scratch;
    return Launched(launch_dense_mlp(launch_.dense, scratch.untyped_data(),
                                     static_cast<int64_t>(scratch.size_bytes()), on),
                    "b12x_moe_block on CUDA, shared expert");
  }
  Error Add() override {
    const auto& params = launch_.routed.params;
    return Launched(
        launch_add(call_.routed.out->untyped_data(), call_.shared_out->untyped_data(),
                   call_.out->untyped_data(), int64_t{params.num_tokens} * params.hidden,
                   params.x_is_fp16 != 0, main_),
        "b12x_moe_block on CUDA, sum");
  }

 private:
  // Makes `later` wait for what is on `earlier` now.
  static Error Wait(cudaStream_t earlier, cudaEvent_t event, cudaStream_t later, const char* what) {
    cudaError_t error = cudaEventRecord(event, earlier);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(later, event, 0);
    return Launched({error, nullptr}, std::string("b12x_moe_block on CUDA, ") + what);
  }

  const BlockCall& call_;
  const BlockLaunch& launch_;
  const runtime::CudaWorkspace* const workspace_;
  const cudaStream_t main_;
  cudaStream_t aux_ = nullptr;  // from the fork on
};

Error MoeBlockCuda(WorkspaceCall* state, int32_t device, cudaStream_t stream,
                   xffi::RemainingArgs args, xffi::RemainingRets rets,
                   xffi::Dictionary attributes) {
  BlockCall call;
  if (Error error = ReadBlockCall(args, rets, attributes, &call); error.failure()) return error;
  try {
    runtime::CudaWorkspace* const workspace = WorkspaceOn(*state, device);
    BlockLaunch launch;
    if (Error error = ReadLaunch(call, workspace, &launch); error.failure()) return error;
    CudaSink sink(call, launch, workspace, stream);
    // Two threads that run the program submit one block after the other, not pieces in turn.
    std::unique_lock<std::mutex> whole;
    if (workspace != nullptr) whole = workspace->LockSubmission();
    if (!runtime::LaunchLog::Get().on()) return Submit(call.program, sink);
    RecordingSink recorder(sink);
    Error error = Submit(call.program, recorder);
    runtime::LaunchRecord record{"b12x_moe_block", recorder.steps(), {}, {}};
    runtime::WalkCapture(stream, &record);
    runtime::LaunchLog::Get().Add(std::move(record));
    return error;
  } catch (const std::exception& error) {
    return Error(xffi::ErrorCode::kFailedPrecondition, error.what());
  }
}

XLA_FFI_DEFINE_HANDLER(kMoeBlockCuda, MoeBlockCuda, BindCudaExecute(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterMoeBlockCuda(Registry& registry) {
  registry.AddTarget("b12x_moe_block", CudaWorkspaceStages(kMoeBlockCuda));
}

}  // namespace b12x::ffi
