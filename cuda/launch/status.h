// What a launcher answers.
#pragma once

#include <cuda_runtime_api.h>

namespace b12x {

// `reason` says why a launch was refused before anything ran; it is null when it was not.
struct LaunchStatus {
  cudaError_t error = cudaSuccess;
  const char* reason = nullptr;
  bool ok() const { return error == cudaSuccess && reason == nullptr; }
};

}  // namespace b12x
