// Fused MoE decode: one cooperative launch, a grid barrier between the two products.
#include <cooperative_groups.h>

#include "cuda/kernels/sm90_moe_decode.cuh"
#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/moe/grid_barrier.cuh"

namespace b12x {
namespace {

// Every CTA waits for every other; false when they are not all on the GPU.
__device__ __forceinline__ bool sync_grid(const MoeDecodeParams& params, GridBarrier& barrier) {
  if (params.barrier.word == nullptr) {  // the caller keeps no word: the driver's own, unbounded
    cooperative_groups::this_grid().sync();
    return true;
  }
  __syncthreads();
  bool arrived = true;
  if (threadIdx.x == 0) {
    barrier.arrive();
    arrived = barrier.wait();
  }
  return __syncthreads_and(arrived) != 0;
}

template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeThreads, 1)
    sm90_moe_decode_fused(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  MoeDecode<Recipe, DecodePart::kBoth> decode(params, shared);
  GridBarrier barrier;
  if (threadIdx.x == 0) barrier.begin(params.barrier);
  bool resident = true;
  decode.begin();
  if (Recipe::kQuantized && !params.plan.input_in_shared) {
    decode.quantize_input_share();
    resident &= sync_grid(params, barrier);
  }
  decode.fc1();
  resident &= sync_grid(params, barrier);
  decode.fc2();
  if (params.geometry.fc2_order == Fc2Order::kOwner) {
    decode.finish_owner(resident);
  } else {
    resident &= sync_grid(params, barrier);
    decode.finish_expert(resident);
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
