// The MoE layer on the CPU, as a plain C++ call: no XLA types, no allocation of tensors.
#ifndef JAX_B12X_FFI_HOST_MOE_H_
#define JAX_B12X_FFI_HOST_MOE_H_

#include <cstdint>

#include "ffi/host/isa.h"
#include "ffi/host/parallel.h"

namespace b12x::host {

enum class Dtype { kF32, kBf16, kF16 };
enum class Recipe { kW4A16, kNvfp4 };
enum class WeightFormat { kNvfp4, kMxfp4 };
enum class Implementation { kFused, kSplit, kDynamic };
enum class ActivationKind { kSilu, kSwigluOai };

struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float alpha = 0;
  float limit = 0;
};

// One call. Matrices are row-major and dense; `jax_b12x.moe.ExpertWeights` documents the weights.
struct MoeProblem {
  Recipe recipe = Recipe::kW4A16;
  WeightFormat weight_format = WeightFormat::kNvfp4;
  Implementation implementation = Implementation::kFused;
  Activation activation;
  Dtype dtype = Dtype::kF32;
  Isa isa = Isa::kBaseline;

  int64_t num_tokens = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  // The dynamic path works through the tokens in slabs of so many; the others in one.
  int64_t slab_tokens = 0;

  const void* x = nullptr;              // dtype[num_tokens, hidden]
  const int32_t* topk_ids = nullptr;    // [num_tokens, top_k]; outside [0, num_experts): no route
  const float* topk_weights = nullptr;  // [num_tokens, top_k]
  const uint8_t* w13 = nullptr;         // [num_experts, 2 * intermediate, hidden / 2]
  const uint8_t* w13_scale = nullptr;
  const float* w13_global_scale = nullptr;  // [num_experts, 2]
  const uint8_t* w2 = nullptr;              // [num_experts, hidden, intermediate / 2]
  const uint8_t* w2_scale = nullptr;
  const float* w2_global_scale = nullptr;  // [num_experts]
  const float* w13_input_scale = nullptr;  // []
  const float* w2_input_scale = nullptr;   // [num_experts]
  const float* w13_bias = nullptr;         // [num_experts, 2 * intermediate], or null
  const float* w2_bias = nullptr;          // [num_experts, hidden], or null
  void* out = nullptr;                     // dtype[num_tokens, hidden]
  void* scratch = nullptr;
};

// The scratch that `RunMoe` needs; `jax_b12x/moe/geometry_cpu.py` computes the same.
int64_t MoeScratchBytes(const MoeProblem& problem);

// Computes the layer. The same inputs give the same bits on every instruction set, for every
// implementation and for any number of threads.
void RunMoe(const MoeProblem& problem, const Executor& executor);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_MOE_H_
