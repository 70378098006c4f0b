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

// Of a fused launch: one kernel for any number of tokens, and one for the launches of a single
// token that plan.one_token names. They give the same bits.
MoeDecodeKernel any_number_kernel(DecodeRecipeId recipe);
MoeDecodeKernel one_token_kernel(DecodeRecipeId recipe);
inline MoeDecodeKernel fused_kernel(DecodeRecipeId recipe, const MoeDecodePlan& plan) {
  return plan.one_token ? one_token_kernel(recipe) : any_number_kernel(recipe);
}

SplitKernels split_kernels(DecodeRecipeId recipe);

}  // namespace b12x
