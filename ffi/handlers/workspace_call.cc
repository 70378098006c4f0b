#include "ffi/handlers/workspace_call.h"

#include <exception>
#include <memory>
#include <string>
#include <string_view>

namespace b12x::ffi {

namespace xffi = xla::ffi;

xffi::TypeId WorkspaceCall::id = {};

namespace {

xffi::ErrorOr<std::unique_ptr<WorkspaceCall>> InstantiateWorkspaceCall(xffi::Dictionary attrs) {
  const auto pool = attrs.get<std::string_view>("workspace_pool");
  const auto lane = attrs.get<std::string_view>("workspace_lane");
  const auto op = attrs.get<std::string_view>("op");
  const auto program = attrs.get<std::string_view>("program");
  const auto site = attrs.get<int64_t>("site");
  const auto bytes = attrs.get<int64_t>("workspace_bytes");
  const auto streams = attrs.get<int64_t>("workspace_streams");
  if (!pool || !lane || !op || !program || !site || !bytes || !streams) {
    return xffi::Unexpected(
        xffi::Error(xffi::ErrorCode::kInvalidArgument,
                    "the call needs the attributes workspace_pool, workspace_lane, op, program "
                    "(strings), site, workspace_bytes and workspace_streams (int64)"));
  }
  auto call = std::make_unique<WorkspaceCall>();
  if (*bytes == 0 && *streams == 0) return call;
  try {
    runtime::WorkspaceSpec spec;
    spec.op = *op;
    spec.program = *program;
    spec.site = *site;
    spec.lane = *lane;
    spec.bytes = *bytes;
    spec.aux_stream = *streams != 0;
    const auto found = runtime::WorkspaceRegistry::Get().Find(std::string(*pool));
    call->lease.emplace(found->Take(spec));
    return call;
  } catch (const std::exception& error) {
    return xffi::Unexpected(xffi::Error(xffi::ErrorCode::kFailedPrecondition, error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(kInstantiateWorkspace, InstantiateWorkspaceCall,
                       xffi::Ffi::BindInstantiate().Attrs());

}  // namespace

xffi::Error PrepareWorkspace(WorkspaceCall* call, int32_t device, void* stream) {
  if (!call->lease.has_value()) return xffi::Error::Success();
  try {
    call->lease->Prepare(device, stream);
    return xffi::Error::Success();
  } catch (const std::exception& error) {
    return xffi::Error(xffi::ErrorCode::kFailedPrecondition, error.what());
  }
}

Stages WorkspaceStages(XLA_FFI_Handler* execute) {
  Stages stages;
  stages.instantiate = kInstantiateWorkspace;
  stages.execute = execute;
  return stages;
}

}  // namespace b12x::ffi
