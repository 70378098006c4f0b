// CUDA calls that throw when they fail, and the guards that our calls need inside XLA's threads.
#ifndef JAX_B12X_FFI_RUNTIME_CUDA_CHECK_H_
#define JAX_B12X_FFI_RUNTIME_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include <string>

#include "ffi/runtime/channel.h"

namespace b12x::runtime {

inline void CudaCheck(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next call of this thread starts afresh
  throw ChannelError(std::string(what) + " failed: " + cudaGetErrorString(error));
}

// Makes a device current, and the old one again at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) {
    CudaCheck(cudaGetDevice(&before_), "cudaGetDevice");
    CudaCheck(cudaSetDevice(ordinal), "cudaSetDevice");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// Allocations may happen in one thread while XLA captures a graph in another: they are no part of
// it.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    CudaCheck(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_CUDA_CHECK_H_
