// Launches a kernel that reads memory and does nothing else.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace b12x {

// Reads `bytes` (a multiple of 16) bytes once. `sink` is one word that the kernel may write.
cudaError_t launch_read_bandwidth(const void* data, int64_t bytes, uint32_t* sink,
                                  cudaStream_t stream);

}  // namespace b12x
