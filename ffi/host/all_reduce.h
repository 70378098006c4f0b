// The arithmetic of the all-reduce on the host. Every output of a group holds the same bits: sums
// are taken in fp32 in rank order, and rounded once.
#ifndef JAX_B12X_FFI_HOST_ALL_REDUCE_H_
#define JAX_B12X_FFI_HOST_ALL_REDUCE_H_

#include <cstdint>
#include <vector>

#include "ffi/host/float_types.h"

namespace b12x::host {

int64_t ByteWidth(FloatType type);

// outputs[r][i] = sum over ranks of inputs[rank][i]. An output may be the input of the same rank.
void AllReduce(FloatType type, int64_t count, const std::vector<const void*>& inputs,
               const std::vector<void*>& outputs);

// The buffers of one rank in `AllReduceRmsNorm`.
struct RmsNormBuffers {
  const void* input = nullptr;     // [rows, hidden]
  const void* residual = nullptr;  // [rows, hidden]
  const void* weight = nullptr;    // [hidden]
  void* normed = nullptr;          // [rows, hidden]
  void* new_residual = nullptr;    // [rows, hidden]
};

// new_residual = round(sum over ranks of input + residual)
// normed = round(new_residual * rsqrt(mean(new_residual^2) + eps) * weight)
// An output may be the input or the residual of the same rank.
void AllReduceRmsNorm(FloatType type, int64_t rows, int64_t hidden, float eps,
                      const std::vector<RmsNormBuffers>& ranks);

void FillNan(FloatType type, int64_t count, void* data);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_ALL_REDUCE_H_
