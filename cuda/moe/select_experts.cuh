// One CTA chooses the experts of one token from its logits, as jax_b12x/moe/routing.py does.
//
// An expert's place is the number of experts that come before it. Counting them takes the same time
// for every top_k, and no thread waits for another's choice.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/moe/activation.cuh"
#include "cuda/moe/router_params.h"

namespace b12x {

// Numbers in the order of the floats that they stand for; 0 is below all of them.
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_order_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// The sum over the warp, in the same order for every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  return value;
}

// How many of `count` (a multiple of 4) keys come before the one at `index`: larger ones, and equal
// ones further in front.
__device__ __forceinline__ int keys_before(const uint32_t* keys, int count, int index) {
  const uint32_t key = keys[index];
  int before = 0;
#pragma unroll 8
  for (int i = 0; i < count; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
    before += (four.x > key || (four.x == key && i < index)) +
              (four.y > key || (four.y == key && i + 1 < index)) +
              (four.z > key || (four.z == key && i + 2 < index)) +
              (four.w > key || (four.w == key && i + 3 < index));
  }
  return before;
}

inline constexpr int kRouterMaxWarps = kRouterMaxExperts / 32;

struct SelectMemory {
  // Of the experts, and of the best ones of every warp; 0 where there is none.
  alignas(16) uint32_t keys[kRouterMaxExperts];
  alignas(16) uint32_t best[kRouterMaxWarps * kRouterMaxTopK + 4];
  int32_t best_id[kRouterMaxWarps * kRouterMaxTopK];
  float best_logit[kRouterMaxWarps * kRouterMaxTopK];
  uint32_t groups[kRouterMaxGroups];
  uint32_t chosen_groups;
  int32_t ids[kRouterMaxTopK];
  float logits[kRouterMaxTopK];
  float exponentials[kRouterMaxWarps];
};

// The best groups, a bit each: those with the largest sums of their two largest scores. Run by the
// whole CTA, whose threads see the keys.
__device__ __forceinline__ uint32_t best_groups(const RouterParams& p, SelectMemory& memory) {
  const int group = threadIdx.x;
  if (group == 0) memory.chosen_groups = 0;
  if (group < p.num_groups) {
    const int size = p.num_experts / p.num_groups;
    uint32_t first = 0, second = 0;
    for (int i = 0; i < size; ++i) {
      const uint32_t key = memory.keys[group * size + i];
      second = max(second, min(first, key));
      first = max(first, key);
    }
    memory.groups[group] =
        size == 1 ? first : order_key(__fadd_rn(from_order_key(first), from_order_key(second)));
  }
  __syncthreads();
  if (group < p.num_groups) {
    int before = 0;
    for (int i = 0; i < p.num_groups; ++i) {
      const uint32_t other = memory.groups[i], own = memory.groups[group];
      before += other > own || (other == own && i < group);
    }
    if (before < p.topk_groups) atomicOr(&memory.chosen_groups, 1u << group);
  }
  __syncthreads();
  return memory.chosen_groups;
}

// Run by a CTA of as many threads as there are experts, rounded up to whole warps.
__device__ __forceinline__ void select_experts(const RouterParams& p, int token, float logit,
                                               SelectMemory& memory) {
  const int expert = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warps = blockDim.x >> 5;
  const bool exists = expert < p.num_experts;
  bool nan = exists && isnan(logit);
  // Finite and without -0, which would order below +0.
  logit = __fadd_rn(fminf(fmaxf(logit, -FLT_MAX), FLT_MAX), 0.0f);
  float score = logit;
  if (p.scoring == Scoring::kSigmoid) {
    score = sigmoid(score);
    if (exists && p.bias != nullptr) score = __fadd_rn(score, p.bias[expert]);
    nan |= exists && isnan(score);
  }
  uint32_t key = exists ? order_key(score) : 0;
  memory.keys[expert] = key;
  nan = __syncthreads_or(nan);
  if (nan) {  // the weights will be NaN; the experts are the first ones
    logit = 0.0f;
    key = exists ? order_key(0.0f) : 0;
    memory.keys[expert] = key;
    __syncthreads();
  }
  if (p.topk_groups < p.num_groups) {
    const uint32_t chosen = best_groups(p, memory);
    if (exists && (chosen >> (expert / (p.num_experts / p.num_groups)) & 1) == 0) {
      key = order_key(-INFINITY);
    }
    memory.keys[expert] = key;
    __syncthreads();
  }

  // The best of each warp, and of those the best of all.
  const int place = keys_before(memory.keys + warp * 32, 32, lane);
  const int candidates = warps * p.top_k;
  if (place < p.top_k) {
    const int at = warp * p.top_k + place;
    memory.best[at] = key;
    memory.best_id[at] = expert;
    memory.best_logit[at] = logit;
  }
  if (threadIdx.x < 4) memory.best[candidates + threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < candidates) {
    const int before = keys_before(memory.best, (candidates + 3) / 4 * 4, threadIdx.x);
    if (before < p.top_k) {
      memory.ids[before] = memory.best_id[threadIdx.x];
      memory.logits[before] = memory.best_logit[threadIdx.x];
    }
  }
  __syncthreads();
  const bool over_all = p.scoring == Scoring::kSoftmax && !p.renormalize;
  if (over_all) {
    const float sum = warp_sum(exists ? expf(__fsub_rn(logit, memory.logits[0])) : 0.0f);
    if (lane == 0) memory.exponentials[warp] = sum;
    __syncthreads();
  }
  if (warp > 0) return;

  const bool active = lane < p.top_k;
  const int routes = p.top_k + p.num_joined;
  const float chosen = active ? memory.logits[lane] : 0.0f;
  float weight = 0.0f;
  if (p.scoring == Scoring::kSoftmax) {
    if (active) weight = expf(__fsub_rn(chosen, memory.logits[0]));
    const float part = over_all ? (lane < warps ? memory.exponentials[lane] : 0.0f) : weight;
    weight = __fdiv_rn(weight, warp_sum(part));
  } else {
    if (active) weight = sigmoid(chosen);
    if (p.renormalize) weight = __fdiv_rn(weight, __fadd_rn(warp_sum(weight), 1e-20f));
  }
  if (active) {
    const bool padding = p.token_mask != nullptr && p.token_mask[token] == 0;
    weight = nan ? __uint_as_float(0x7FC00000u) : __fmul_rn(weight, p.scale);
    p.topk_ids[int64_t{token} * routes + lane] = padding ? -1 : memory.ids[lane];
    p.topk_weights[int64_t{token} * routes + lane] = padding ? 0.0f : weight;
  } else if (lane < routes) {  // padding as well goes to them
    p.topk_ids[int64_t{token} * routes + lane] = p.num_experts + lane - p.top_k;
    p.topk_weights[int64_t{token} * routes + lane] = 1.0f;
  }
}

}  // namespace b12x
