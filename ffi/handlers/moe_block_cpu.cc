// `b12x_moe_block` on the `cpu` platform. It submits what the GPU would, in the same order, and
// runs each piece as it comes: on one processor there is nothing to fork.
#include <string>
#include <utility>

#include "ffi/handlers/block_call.h"
#include "ffi/handlers/families.h"
#include "ffi/handlers/host_executor.h"
#include "ffi/handlers/moe_call_cpu.h"
#include "ffi/handlers/workspace_call.h"
#include "ffi/host/add.h"
#include "ffi/host/dense_mlp.h"
#include "ffi/host/moe.h"
#include "ffi/host/router.h"
#include "ffi/runtime/launch_log.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;
using xffi::Error;

// A block, decoded and checked.
struct BlockProblem {
  host::RouterProblem router;
  host::MoeProblem routed;
  host::MoeProblem shared;
  host::DenseMlpProblem dense;
};

Error Refuse(const std::string& message) {
  return Error::InvalidArgument("b12x_moe_block on cpu: " + message);
}

Error ReadDense(BlockCall& call, host::Dtype dtype, host::DenseMlpProblem* problem) {
  problem->dtype = dtype;
  problem->activation.alpha = call.dense_alpha;
  problem->activation.limit = call.dense_limit;
  Error error = ReadActivation(call.dense_activation, &problem->activation.kind);
  if (error.success()) error = ReadDenseMlpBuffers(*call.dense, problem);
  if (error.failure()) return error;
  problem->scratch = call.dense_scratch->untyped_data();
  if (static_cast<int64_t>(call.dense_scratch->size_bytes()) <
      host::DenseMlpScratchBytes(*problem)) {
    return Refuse("the dense expert's scratch is too small");
  }
  return error;
}

Error ReadProblem(BlockCall& call, BlockProblem* problem) {
  Error error = ReadMoeCall(call.routed_attributes, call.routed, &problem->routed);
  if (error.success() && call.shared_experts.has_value()) {
    error = ReadMoeCall(call.shared_attributes, *call.shared_experts, &problem->shared);
  }
  if (error.success() && call.dense.has_value()) {
    error = ReadDense(call, problem->routed.dtype, &problem->dense);
  }
  if (error.success() && call.router.has_value()) {
    error = ReadRouterCall(*call.router, call.router_attributes, &problem->router);
    if (error.failure()) return error;
    problem->router.scratch = call.router_scratch->untyped_data();
    if (static_cast<int64_t>(call.router_scratch->size_bytes()) <
        host::RouterScratchBytes(problem->router)) {
      return Refuse("the router's scratch is too small");
    }
  }
  if (error.failure()) return error;
  if (call.out->element_count() !=
      static_cast<size_t>(problem->routed.num_tokens * problem->routed.hidden)) {
    return Refuse("out must be like x");
  }
  return error;
}

class HostSink : public LaunchSink {
 public:
  HostSink(const BlockCall& call, const BlockProblem& problem, host::Executor executor)
      : call_(call), problem_(problem), executor_(std::move(executor)) {}

  Error Fork() override { return Error::Success(); }
  Error Join() override { return Error::Success(); }
  Error Router() override {
    host::RunRouter(problem_.router, executor_);
    return Error::Success();
  }
  Error Routed() override {
    host::RunMoe(problem_.routed, executor_);
    return Error::Success();
  }
  Error Shared(BlockStream) override {
    if (call_.dense.has_value()) {
      host::RunDenseMlp(problem_.dense, executor_);
    } else {
      host::RunMoe(problem_.shared, executor_);
    }
    return Error::Success();
  }
  Error Add() override {
    host::Add(problem_.routed.dtype, problem_.routed.num_tokens * problem_.routed.hidden,
              call_.routed.out->untyped_data(), call_.shared_out->untyped_data(),
              call_.out->untyped_data(), executor_);
    return Error::Success();
  }

 private:
  const BlockCall& call_;
  const BlockProblem& problem_;
  const host::Executor executor_;
};

Error MoeBlockCpu(WorkspaceCall* workspace, int32_t device, xffi::ThreadPool pool,
                  xffi::RemainingArgs args, xffi::RemainingRets rets, xffi::Dictionary attributes) {
  if (Error error = PrepareWorkspace(workspace, device, nullptr); error.failure()) return error;
  BlockCall call;
  if (Error error = ReadBlockCall(args, rets, attributes, &call); error.failure()) return error;
  BlockProblem problem;
  if (Error error = ReadProblem(call, &problem); error.failure()) return error;
  HostSink sink(call, problem, ExecutorOf(pool));
  if (!runtime::LaunchLog::Get().on()) return Submit(call.program, sink);
  RecordingSink recorder(sink);
  Error error = Submit(call.program, recorder);
  runtime::LaunchLog::Get().Add({"b12x_moe_block", recorder.steps(), {}, {}});
  return error;
}

XLA_FFI_DEFINE_HANDLER(kMoeBlockCpu, MoeBlockCpu, BindHostExecute());

}  // namespace

void RegisterMoeBlockCpu(Registry& registry) {
  registry.AddTarget("b12x_moe_block", WorkspaceStages(kMoeBlockCpu));
}

}  // namespace b12x::ffi
