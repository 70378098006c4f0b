// What one router launch needs to know: plain pointers and numbers, passed by value.
#pragma once

#include <cstdint>

namespace b12x {

enum class RouterDtype : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };
enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

inline constexpr int kRouterMaxExperts = 1024;
inline constexpr int kRouterMaxTopK = 16;
inline constexpr int kRouterMaxGroups = 32;

// Matrices are row-major and dense, their rows 16-byte aligned.
struct RouterParams {
  const void* x = nullptr;              // x_dtype[num_tokens, hidden]
  const void* weight = nullptr;         // weight_dtype[num_experts, hidden]
  const float* bias = nullptr;          // [num_experts]; softmax: part of the logits; sigmoid: for
                                        // choosing only. Or null
  const uint8_t* token_mask = nullptr;  // [num_tokens], 0: padding. Or null
  int32_t* topk_ids = nullptr;          // [num_tokens, top_k + num_joined]
  float* topk_weights = nullptr;        // [num_tokens, top_k + num_joined]
  float* logits = nullptr;              // [num_tokens, num_experts]
  int32_t num_tokens = 0;
  int32_t hidden = 0;  // a multiple of 16
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t num_joined = 0;  // experts from num_experts on, to which every token goes with weight 1
  RouterDtype x_dtype = RouterDtype::kBf16;
  RouterDtype weight_dtype = RouterDtype::kBf16;
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = true;
  float scale = 1.0f;       // multiplies the weights in the end
  int32_t num_groups = 1;   // sigmoid: equal groups of experts
  int32_t topk_groups = 1;  // sigmoid: groups that a token may use
};

}  // namespace b12x
