// The lease of a workspace: taken when a program is made, ended with it.
#ifndef JAX_B12X_FFI_HANDLERS_WORKSPACE_CALL_H_
#define JAX_B12X_FFI_HANDLERS_WORKSPACE_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "ffi/runtime/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// The state of one call site in one executable.
struct WorkspaceCall {
  static xla::ffi::TypeId id;
  // Empty where the call needs nothing that persists.
  std::optional<runtime::WorkspaceLease> lease;
};

// The *instantiate* stage. Attributes, as `jax_b12x/workspace_call.py` writes them:
// `workspace_pool`, `workspace_lane`, `program` (strings), `site`, `workspace_bytes` and
// `workspace_streams` (int64).
xla::ffi::ErrorOr<std::unique_ptr<WorkspaceCall>> InstantiateWorkspaceCall(
    xla::ffi::Dictionary attrs);

// Makes the device's part the first time and looks for a fault: the *initialize* stage where the
// platform has it. `stream` is what executions run on, null where there is no such thing.
xla::ffi::Error PrepareWorkspace(WorkspaceCall* call, int32_t device, void* stream);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_WORKSPACE_CALL_H_
