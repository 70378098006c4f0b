// The outcome of a launch, as XLA takes it.
#ifndef JAX_B12X_FFI_HANDLERS_LAUNCHED_H_
#define JAX_B12X_FFI_HANDLERS_LAUNCHED_H_

#include <string>

#include "cuda/launch/status.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// `what` begins the message of an error.
inline xla::ffi::Error Launched(const LaunchStatus& status, const std::string& what) {
  if (status.reason != nullptr) {
    return xla::ffi::Error::InvalidArgument(what + ": " + status.reason);
  }
  if (status.error != cudaSuccess) {
    return xla::ffi::Error::Internal(what +
                                     ": the launch failed: " + cudaGetErrorString(status.error));
  }
  return xla::ffi::Error::Success();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_LAUNCHED_H_
