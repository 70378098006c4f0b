// The sum of two arrays on the host.
#ifndef JAX_B12X_FFI_HOST_ADD_H_
#define JAX_B12X_FFI_HOST_ADD_H_

#include <cstdint>

#include "ffi/host/moe.h"
#include "ffi/host/parallel.h"

namespace b12x::host {

// out[i] = a[i] + b[i] in fp32, rounded once. `out` may be one of them.
void Add(Dtype dtype, int64_t count, const void* a, const void* b, void* out,
         const Executor& executor);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_ADD_H_
