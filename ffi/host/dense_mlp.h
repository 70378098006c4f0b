// The dense gated MLP on the CPU, as a plain C++ call: no XLA types, no allocation of tensors.
#ifndef JAX_B12X_FFI_HOST_DENSE_MLP_H_
#define JAX_B12X_FFI_HOST_DENSE_MLP_H_

#include <cstdint>

#include "ffi/host/moe.h"
#include "ffi/host/parallel.h"

namespace b12x::host {

// One call. Matrices are row-major and dense; `jax_b12x.moe.dense` says what is computed.
struct DenseMlpProblem {
  Dtype dtype = Dtype::kF32;
  Activation activation;

  int64_t num_tokens = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;

  const void* x = nullptr;            // dtype[num_tokens, hidden]
  const void* w13 = nullptr;          // dtype[2 * intermediate, hidden]: gate rows, then up rows
  const void* w2 = nullptr;           // dtype[hidden, intermediate]
  const float* w13_bias = nullptr;    // [2 * intermediate], or null
  const float* w2_bias = nullptr;     // [hidden], or null
  const void* shared_gate = nullptr;  // dtype[hidden], or null
  void* out = nullptr;                // dtype[num_tokens, hidden]
  void* scratch = nullptr;
};

// The scratch that `RunDenseMlp` needs.
int64_t DenseMlpScratchBytes(const DenseMlpProblem& problem);

// Computes the MLP. The same inputs give the same bits on every processor and for any number of
// threads.
void RunDenseMlp(const DenseMlpProblem& problem, const Executor& executor);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_DENSE_MLP_H_
