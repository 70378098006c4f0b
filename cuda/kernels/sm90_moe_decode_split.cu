// Split MoE decode: the products as launches of their own, with no barrier across the grid. A
// launch starts while the one before it drains, lists its work and requests its first weights, and
// then waits for it.
#include "cuda/kernels/sm90_moe_decode.cuh"
#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/ptx/launch_dependency.cuh"

namespace b12x {
namespace {

// Quantizes x for many tokens; few are quantized by every CTA of the first product for itself.
template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeThreads, 1)
    sm90_moe_decode_quantize(const __grid_constant__ MoeDecodeParams params) {
  ptx::launch_dependents();
  quantize_input_share<kMoeDecodeThreads>(params, threadIdx.x);
}

template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeLaunchThreads, 1)
    sm90_moe_decode_fc1(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  ptx::launch_dependents();
  MoeDecode<Recipe, DecodePart::kFc1> decode(params, shared);
  if (decode.is_multiplier()) {
    decode.begin_multiplying();
    if (Recipe::kQuantized && !params.plan.input_in_shared) ptx::wait_for_prior_kernel();
    decode.template multiply<1>(decode.template view_of<1>());
  } else {
    if (decode.is_requester()) return decode.request();
    decode.begin_finishing();
    decode.template finish<1>(decode.template view_of<1>());
  }
}

template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeLaunchThreads, 1)
    sm90_moe_decode_fc2(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  ptx::launch_dependents();
  MoeDecode<Recipe, DecodePart::kFc2> decode(params, shared);
  if (decode.is_multiplier()) {
    decode.begin_multiplying();
    const auto second = decode.template view_of<2>();
    ptx::wait_for_prior_kernel();
    decode.template multiply<2>(second);
    if (params.geometry.fc2_order == Fc2Order::kOwner) sync_workers();
  } else {
    if (decode.is_requester()) return decode.request();
    decode.begin_finishing();
    // What an earlier kernel reads must not be written before it has ended.
    const auto second = decode.template view_of<2>();
    ptx::wait_for_prior_kernel();
    decode.template finish<2>(second);
    if (params.geometry.fc2_order == Fc2Order::kOwner) decode.finish_owner();
  }
}

// The last step of Fc2Order::kExpert.
template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeThreads, 1)
    sm90_moe_decode_sum(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  MoeDecode<Recipe, DecodePart::kFc2> decode(params, shared);
  decode.begin_finish();
  ptx::wait_for_prior_kernel();
  decode.template finish_expert<false>();
}

template <typename Recipe>
SplitKernels kernels() {
  MoeDecodeKernel quantize = nullptr;
  if constexpr (Recipe::kQuantized) quantize = sm90_moe_decode_quantize<Recipe>;
  return {quantize, sm90_moe_decode_fc1<Recipe>, sm90_moe_decode_fc2<Recipe>,
          sm90_moe_decode_sum<Recipe>};
}

}  // namespace

SplitKernels split_kernels(DecodeRecipeId recipe) {
  switch (recipe) {
    case DecodeRecipeId::kW4A16Bf16:
      return kernels<W4A16Bf16>();
    case DecodeRecipeId::kW4A16Fp16:
      return kernels<W4A16Fp16>();
    case DecodeRecipeId::kW4A16Mxfp4:
      return kernels<W4A16Mxfp4>();
    case DecodeRecipeId::kNvfp4:
      return kernels<Nvfp4>();
  }
  return {};
}

}  // namespace b12x
