// Fused MoE decode: one cooperative launch, a grid barrier between the two products.
#include <cooperative_groups.h>

#include "cuda/kernels/sm90_moe_decode.cuh"
#include "cuda/kernels/sm90_moe_decode_kernels.h"

namespace b12x {
namespace {

template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeThreads, 1)
    sm90_moe_decode_fused(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  MoeDecode<Recipe, DecodePart::kBoth> decode(params, shared);
  decode.begin();
  if (Recipe::kQuantized && !params.plan.input_in_shared) {
    decode.quantize_input_share();
    cooperative_groups::this_grid().sync();
  }
  decode.fc1();
  cooperative_groups::this_grid().sync();
  decode.fc2();
  if (params.geometry.fc2_order == Fc2Order::kOwner) {
    decode.finish_owner();
  } else {
    cooperative_groups::this_grid().sync();
    decode.finish_expert();
  }
}

}  // namespace

MoeDecodeKernel fused_kernel(DecodeRecipeId recipe) {
  switch (recipe) {
    case DecodeRecipeId::kW4A16Bf16:
      return sm90_moe_decode_fused<W4A16Bf16>;
    case DecodeRecipeId::kW4A16Fp16:
      return sm90_moe_decode_fused<W4A16Fp16>;
    case DecodeRecipeId::kW4A16Mxfp4:
      return sm90_moe_decode_fused<W4A16Mxfp4>;
    case DecodeRecipeId::kNvfp4:
      return sm90_moe_decode_fused<Nvfp4>;
  }
  return nullptr;
}

}  // namespace b12x
