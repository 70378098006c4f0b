// The record of submitted work, for Python: the same in both extensions.
#ifndef JAX_B12X_FFI_BINDINGS_LAUNCH_LOG_H_
#define JAX_B12X_FFI_BINDINGS_LAUNCH_LOG_H_

#include <nanobind/nanobind.h>

namespace b12x::ffi {

// Adds `record_launches(on)` and `take_launches()`.
void ExportLaunchLog(nanobind::module_& module);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_BINDINGS_LAUNCH_LOG_H_
