// Fused MoE decode: one cooperative launch, a grid barrier between the two products.
#include "cuda/kernels/sm90_moe_decode.cuh"
#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/moe/grid_barrier.cuh"

namespace b12x {
namespace {

// Every CTA waits for every other; false when they are not all on the GPU. The weights go on coming
// meanwhile: their warp takes no part. The finishers come with the barrier, the multipliers
// without.
__device__ __forceinline__ bool sync_grid(GridBarrier* barrier = nullptr) {
  sync_workers();
  bool arrived = true;
  if (barrier != nullptr && threadIdx.x == kMoeDecodeLaunchThreads - 32) {
    barrier->arrive();
    arrived = barrier->wait();
  }
  return all_workers(arrived);
}

template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeLaunchThreads, 1)
    sm90_moe_decode_fused(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  MoeDecode<Recipe, DecodePart::kBoth> decode(params, shared);
  const bool share_input = Recipe::kQuantized && !params.plan.input_in_shared;
  const bool sum_over_grid = params.geometry.fc2_order == Fc2Order::kExpert;
  if (decode.is_multiplier()) {
    decode.begin_multiplying();
    if (share_input) all_workers(true);
    decode.template multiply<1>(decode.template view_of<1>());
    // What does not need the others' results is done before the meeting.
    const auto second = decode.template view_of<2>();
    sync_grid();
    decode.template multiply<2>(second);
    if (sum_over_grid) decode.finish_expert(sync_grid());
  } else {
    if (decode.is_requester()) return decode.request();
    GridBarrier barrier;
    constexpr int kFirst = kMoeDecodeLaunchThreads - 32 * kMoeFinishWarps;
    const bool meets = threadIdx.x == kMoeDecodeLaunchThreads - 32;
    if (meets) barrier.begin(params.barrier);
    bool resident = true;
    if (share_input) {
      // Meanwhile the multipliers list the work.
      pass_sync_all();
      quantize_input_share<32 * kMoeFinishWarps>(params, threadIdx.x - kFirst);
      sync_finishers();
      if (meets) {
        barrier.arrive();
        resident = barrier.wait();
      }
      resident = all_workers(resident);
      decode.prepare_finishing();
    } else {
      decode.begin_finishing();
    }
    decode.template finish<1>(decode.template view_of<1>());
    const auto second = decode.template view_of<2>();
    resident &= sync_grid(&barrier);
    decode.template finish<2>(second);
    if (sum_over_grid) {
      sync_grid(&barrier);
    } else {
      decode.finish_owner(resident);
    }
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
