// What a stream's capture has put into its graph so far.
#ifndef JAX_B12X_FFI_RUNTIME_CAPTURED_GRAPH_H_
#define JAX_B12X_FFI_RUNTIME_CAPTURED_GRAPH_H_

#include <cuda_runtime_api.h>

#include "ffi/runtime/launch_log.h"

namespace b12x::runtime {

// Fills in `nodes` and `edges`; leaves them empty where `stream` is not being captured.
void WalkCapture(cudaStream_t stream, LaunchRecord* record);

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_CAPTURED_GRAPH_H_
