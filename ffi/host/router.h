// The router on the CPU, as a plain C++ call: no XLA types, no allocation of tensors.
#ifndef JAX_B12X_FFI_HOST_ROUTER_H_
#define JAX_B12X_FFI_HOST_ROUTER_H_

#include <cstdint>

#include "ffi/host/moe.h"
#include "ffi/host/parallel.h"

namespace b12x::host {

enum class Scoring { kSoftmax, kSigmoid };

// One call. Matrices are row-major and dense; `jax_b12x.moe.routing.route` says what is computed.
struct RouterProblem {
  Dtype x_dtype = Dtype::kF32;
  Dtype weight_dtype = Dtype::kF32;
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = true;
  float scale = 1.0f;

  int64_t num_tokens = 0;
  int64_t hidden = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t num_joined = 0;   // experts from num_experts on, to which every token goes with weight 1
  int64_t num_groups = 1;   // sigmoid: equal groups of experts
  int64_t topk_groups = 1;  // sigmoid: groups that a token may use

  const void* x = nullptr;              // x_dtype[num_tokens, hidden]
  const void* weight = nullptr;         // weight_dtype[num_experts, hidden]
  const float* bias = nullptr;          // [num_experts], or null
  const uint8_t* token_mask = nullptr;  // [num_tokens], 0: padding. Or null
  int32_t* topk_ids = nullptr;          // [num_tokens, top_k + num_joined]
  float* topk_weights = nullptr;        // [num_tokens, top_k + num_joined]
  float* logits = nullptr;              // [num_tokens, num_experts]
  void* scratch = nullptr;
};

// The scratch that `RunRouter` needs.
int64_t RouterScratchBytes(const RouterProblem& problem);

// Computes logits and routes. The same inputs give the same logits on every processor and for any
// number of threads.
void RunRouter(const RouterProblem& problem, const Executor& executor);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_ROUTER_H_
