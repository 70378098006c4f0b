// The lease of a workspace: taken when a program is made, ended with it.
#ifndef JAX_B12X_FFI_HANDLERS_WORKSPACE_CALL_H_
#define JAX_B12X_FFI_HANDLERS_WORKSPACE_CALL_H_

#include <cstdint>
#include <optional>

#include "ffi/registry.h"
#include "ffi/runtime/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// The state of one call site in one executable.
struct WorkspaceCall {
  static xla::ffi::TypeId id;
  // Empty where the call needs nothing that persists.
  std::optional<runtime::WorkspaceLease> lease;
};

// Makes the device's part the first time and looks for a fault: the *initialize* stage where the
// platform has it. `stream` is what executions run on, null where there is no such thing.
xla::ffi::Error PrepareWorkspace(WorkspaceCall* call, int32_t device, void* stream);

// The stages of a target with a workspace: all that the `cpu` platform has. *instantiate* takes the
// lease by attributes that `jax_b12x/workspace_call.py` writes: `workspace_pool`, `workspace_lane`,
// `op`, `program` (strings), `site`, `workspace_bytes` and `workspace_streams` (int64).
Stages WorkspaceStages(XLA_FFI_Handler* execute);

// What an *execute* of the `cpu` platform is a function of, with a workspace.
inline auto BindHostExecute() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::State<WorkspaceCall>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<xla::ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_WORKSPACE_CALL_H_
