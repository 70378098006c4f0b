// Workspace pools as `jax_b12x/workspace.py` sees them: the same class in both extensions.
#ifndef JAX_B12X_FFI_BINDINGS_WORKSPACE_H_
#define JAX_B12X_FFI_BINDINGS_WORKSPACE_H_

#include <nanobind/nanobind.h>

#include "ffi/runtime/workspace.h"

namespace b12x::ffi {

// Adds `NativeWorkspacePool`, `open_workspace_pool(...)` and `find_workspace_pool(name)`, whose
// workspaces get their parts from `make`.
void ExportWorkspaces(nanobind::module_& module, runtime::MakeDeviceWorkspace make);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_BINDINGS_WORKSPACE_H_
