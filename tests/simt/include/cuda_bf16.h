// bfloat16 on a CPU, as far as kernels use it.
#ifndef JAX_B12X_TESTS_SIMT_CUDA_BF16_H_
#define JAX_B12X_TESTS_SIMT_CUDA_BF16_H_

#include <cuda_runtime_api.h>

#include "ffi/host/float_types.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) { return b12x::host::BF16::Widen(value.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {b12x::host::BF16::Round(value)}; }

#endif  // JAX_B12X_TESTS_SIMT_CUDA_BF16_H_
