// fp16 on a CPU, as far as kernels use it.
#ifndef JAX_B12X_TESTS_SIMT_CUDA_FP16_H_
#define JAX_B12X_TESTS_SIMT_CUDA_FP16_H_

#include <cuda_runtime_api.h>

#include "ffi/host/float_types.h"

struct __half {
  uint16_t bits;
};
inline float __half2float(__half value) { return b12x::host::F16::Widen(value.bits); }
inline __half __float2half_rn(float value) { return {b12x::host::F16::Round(value)}; }

#endif  // JAX_B12X_TESTS_SIMT_CUDA_FP16_H_
