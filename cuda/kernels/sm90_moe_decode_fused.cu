// Fused MoE decode: one cooperative launch. The second product reads the first one's results as
// they are written by other CTAs, and the sum over top-k the second one's; a grid barrier at the
// beginning, which nobody has to wait for long, says that all CTAs are running and that what lay in
// the place of those results before is gone.
#include "cuda/kernels/sm90_moe_decode.cuh"
#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/moe/grid_barrier.cuh"

namespace b12x {
namespace {

// Of the threads of a CTA, the one that meets the other CTAs.
constexpr int kMeeting = kMoeDecodeLaunchThreads - 32;

template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeLaunchThreads, 1)
    sm90_moe_decode_fused(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  MoeDecode<Recipe, DecodePart::kBoth> decode(params, shared);
  // The first product waits for all CTAs too where they share quantizing x.
  const bool share_input = Recipe::kQuantized && !params.plan.input_in_shared;
  const bool sum_over_grid = params.geometry.fc2_order == Fc2Order::kExpert;
  if (decode.is_multiplier()) {
    decode.begin_multiplying();
    if (share_input) sync_workers();
    decode.template multiply<1>(decode.template view_of<1>());
    const auto second = decode.template view_of<2>();
    // The second product's sums take the place of the first one's.
    decode.template multiply<2>(second);
    if (sum_over_grid) {
      decode.template finish_expert<true>(decode.resident());
    } else {
      sync_workers();
    }
  } else {
    if (decode.is_requester()) return decode.request();
    GridBarrier barrier;
    constexpr int kFirst = kMoeDecodeLaunchThreads - 32 * kMoeFinishWarps;
    const bool meets = threadIdx.x == kMeeting;
    if (meets) barrier.begin(params.barrier);
    decode.mark_intermediate();
    if (share_input) {
      // Meanwhile the multipliers list the work.
      pass_sync_all();
      quantize_input_share<32 * kMoeFinishWarps>(params, threadIdx.x - kFirst);
    }
    sync_marked();
    if (meets) barrier.arrive();
    if (!share_input) decode.begin_finishing();
    const bool resident = all_finishers(!meets || barrier.wait());
    if (share_input) {
      sync_workers();
      decode.prepare_finishing();
    }
    decode.template finish<1>(decode.template view_of<1>());
    decode.say_first_is_finished(resident);
    decode.template finish<2>(decode.template view_of<2>());
    if (!sum_over_grid) decode.finish_owner(resident);
  }
}

}  // namespace

MoeDecodeKernel any_number_kernel(DecodeRecipeId recipe) {
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
