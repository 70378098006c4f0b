// What one dense MLP launch needs to know: plain pointers and numbers, passed by value.
#pragma once

#include <cstdint>

#include "cuda/moe/activation.h"

namespace b12x {

inline constexpr int kDenseMlpMaxTokens = 64;  // of one launch

// Matrices are row-major and dense, their rows 16-byte aligned. `T` is bfloat16 or, with `fp16`,
// float16.
struct DenseMlpParams {
  const void* x = nullptr;            // T[num_tokens, hidden]
  const void* w13 = nullptr;          // T[2 * intermediate, hidden]: gate rows, then up rows
  const void* w2 = nullptr;           // T[hidden, intermediate]
  const float* w13_bias = nullptr;    // [2 * intermediate], or null
  const float* w2_bias = nullptr;     // [hidden], or null
  const void* shared_gate = nullptr;  // T[hidden], or null: out is times sigmoid(x . shared_gate)
  void* out = nullptr;                // T[num_tokens, hidden]
  int32_t num_tokens = 0;
  int32_t hidden = 0;        // a multiple of 16
  int32_t intermediate = 0;  // a multiple of 16
  bool fp16 = false;
  Activation activation = Activation::kSilu;
  float alpha = 0;
  float limit = 0;
};

}  // namespace b12x
