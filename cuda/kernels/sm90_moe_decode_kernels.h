// The compiled MoE decode kernels, by recipe.
#pragma once

#include "cuda/moe/params.h"

namespace b12x {

enum class DecodeRecipeId { kW4A16Bf16, kW4A16Fp16, kW4A16Mxfp4, kNvfp4 };

using MoeDecodeKernel = void (*)(MoeDecodeParams);

struct SplitKernels {
  MoeDecodeKernel quantize = nullptr;  // nvfp4, before fc1, where plan.input_in_shared is false
  MoeDecodeKernel fc1 = nullptr;
  MoeDecodeKernel fc2 = nullptr;
  MoeDecodeKernel sum = nullptr;  // only after Fc2Order::kExpert
};

MoeDecodeKernel fused_kernel(DecodeRecipeId recipe);
SplitKernels split_kernels(DecodeRecipeId recipe);

}  // namespace b12x
