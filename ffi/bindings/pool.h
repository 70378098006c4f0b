// Pools as `jax_b12x/comm` sees them: the same class in both extensions.
#ifndef JAX_B12X_FFI_BINDINGS_POOL_H_
#define JAX_B12X_FFI_BINDINGS_POOL_H_

#include <nanobind/nanobind.h>

#include "ffi/runtime/exchange.h"
#include "ffi/runtime/pool.h"

namespace b12x::ffi {

// Adds `NativePool` and `open_pool(...)`, whose channels get their memory from `make_memory`.
void ExportPools(nanobind::module_& module,
                 runtime::Pool::MakeMemory (*make_memory)(runtime::Exchange));

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_BINDINGS_POOL_H_
