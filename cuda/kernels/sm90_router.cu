// The router on Hopper: logits of few tokens at the speed of reading the weights, then the choice.
//
// A CTA of the first launch has a few experts, and its threads 8 columns of every 2,048 each. The
// second launch has a CTA for each token; it starts while the first one runs and waits for it.
// Products and sums are fp32 and their order is the same for every tile and number of tokens.
#include "cuda/kernels/sm90_router.h"
#include "cuda/moe/activation.cuh"
#include "cuda/moe/select_experts.cuh"
#include "cuda/ptx/launch_dependency.cuh"
#include "cuda/ptx/memory.cuh"

namespace b12x {
namespace {

constexpr int kWarps = kRouterThreads / 32;
constexpr int kColumns = 8;  // of a thread, next to each other
constexpr int kStep = kColumns * kRouterThreads;

// 8 neighbouring elements of 16 or 32 bits, as they lie in memory.
template <bool kWide>
struct Elements {
  uint4 words[kWide ? 2 : 1];

  __device__ __forceinline__ void load_weights(const void* array, int64_t index, bool valid,
                                               uint64_t policy) {
    const char* const at = static_cast<const char*>(array) + index * (kWide ? 4 : 2);
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i) {
      words[i] = ptx::load_weights_16(at + 16 * i, valid, policy);
    }
  }

  __device__ __forceinline__ void load_tokens(const void* array, int64_t index, bool valid) {
    const char* const at = static_cast<const char*>(array) + index * (kWide ? 4 : 2);
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i) {
      words[i] = valid ? ptx::load_16(at + 16 * i) : uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void widen(float (&out)[kColumns], bool fp16) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        out[4 * i] = __uint_as_float(words[i].x);
        out[4 * i + 1] = __uint_as_float(words[i].y);
        out[4 * i + 2] = __uint_as_float(words[i].z);
        out[4 * i + 3] = __uint_as_float(words[i].w);
      }
    } else {
      const uint32_t pairs[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        out[i] = to_float(static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16)), fp16);
      }
    }
  }
};

// Adds each of kCount (at most 32, a power of two) values over the warp. A lane ends with one total
// in `values[0]`, that of the value at the returned index.
template <int kCount>
__device__ __forceinline__ int fold(float (&values)[kCount], int lane) {
  int index = 0;
  int count = kCount;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = (lane & offset) != 0;
      index += upper ? count : 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        if (i < count) {
          const float mine = upper ? values[i + count] : values[i];
          const float other = upper ? values[i] : values[i + count];
          values[i] = __fadd_rn(mine, __shfl_xor_sync(0xFFFFFFFFu, other, offset));
        }
      }
    } else {
      values[0] = __fadd_rn(values[0], __shfl_xor_sync(0xFFFFFFFFu, values[0], offset));
    }
  }
  return index;
}

template <bool kWideX, bool kWideWeight, int kExperts, int kTokens>
__global__ void __launch_bounds__(kRouterThreads)
    sm90_router_logits(const __grid_constant__ RouterParams p) {
  constexpr int kSums = kExperts * kTokens;
  static_assert(kSums <= 32, "fold() leaves one sum a lane");
  // Steps whose loads are requested together.
  constexpr int kUnroll = kTokens > 1 ? 1 : kExperts <= 2 ? 4 : kExperts == 4 ? 2 : 1;
  __shared__ float partial[kWarps][kSums];
  ptx::launch_dependents();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_expert = blockIdx.x * kExperts, first_token = blockIdx.y * kTokens;
  const int num_tokens = min(kTokens, p.num_tokens - first_token);
  const bool fp16_x = p.x_dtype == RouterDtype::kF16;
  const bool fp16_weight = p.weight_dtype == RouterDtype::kF16;
  const uint64_t policy = ptx::evict_first_policy();

  float sums[kSums] = {};
  for (int begin = threadIdx.x * kColumns; begin < p.hidden; begin += kUnroll * kStep) {
    Elements<kWideWeight> weights[kUnroll][kExperts];
    Elements<kWideX> x[kUnroll][kTokens];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int column = begin + u * kStep;
      const bool valid = column < p.hidden;
#pragma unroll
      for (int e = 0; e < kExperts; ++e) {
        const int expert = min(first_expert + e, p.num_experts - 1);
        weights[u][e].load_weights(p.weight, int64_t{expert} * p.hidden + column, valid, policy);
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        x[u][t].load_tokens(p.x, int64_t{first_token + t} * p.hidden + column,
                            valid && t < num_tokens);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float w[kExperts][kColumns];
#pragma unroll
      for (int e = 0; e < kExperts; ++e) weights[u][e].widen(w[e], fp16_weight);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t < num_tokens) {
          float a[kColumns];
          x[u][t].widen(a, fp16_x);
#pragma unroll
          for (int e = 0; e < kExperts; ++e) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
              sums[e * kTokens + t] = __fmaf_rn(w[e][i], a[i], sums[e * kTokens + t]);
            }
          }
        }
      }
    }
  }
  const int index = fold(sums, lane);
  partial[warp][index] = sums[0];
  __syncthreads();
  if (threadIdx.x < kSums) {
    const int token = threadIdx.x % kTokens, expert = first_expert + threadIdx.x / kTokens;
    float logit = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) logit = __fadd_rn(logit, partial[w][threadIdx.x]);
    if (token < num_tokens && expert < p.num_experts) {
      if (p.scoring == Scoring::kSoftmax && p.bias != nullptr) {
        logit = __fadd_rn(logit, p.bias[expert]);
      }
      p.logits[int64_t{first_token + token} * p.num_experts + expert] = logit;
    }
  }
}

__global__ void __launch_bounds__(kRouterMaxExperts)
    sm90_router_select(const __grid_constant__ RouterParams p) {
  __shared__ SelectMemory memory;
  const int token = blockIdx.x, expert = threadIdx.x;
  ptx::wait_for_prior_kernel();
  // Written by the launch before: not a load of the read-only cache.
  const float logit =
      expert < p.num_experts ? __ldcg(p.logits + int64_t{token} * p.num_experts + expert) : 0.0f;
  select_experts(p, token, logit, memory);
}

template <bool kWideX, bool kWideWeight, int kTokens>
RouterKernel kernel_of(int expert_tile) {
  if constexpr (kTokens > 1) {
    return expert_tile == 2 ? sm90_router_logits<kWideX, kWideWeight, 2, kTokens>
                            : sm90_router_logits<kWideX, kWideWeight, 4, kTokens>;
  } else {
    switch (expert_tile) {
      case 1:
        return sm90_router_logits<kWideX, kWideWeight, 1, kTokens>;
      case 2:
        return sm90_router_logits<kWideX, kWideWeight, 2, kTokens>;
      case 4:
        return sm90_router_logits<kWideX, kWideWeight, 4, kTokens>;
      default:
        return sm90_router_logits<kWideX, kWideWeight, 8, kTokens>;
    }
  }
}

template <bool kWideX, bool kWideWeight>
RouterKernel kernel_of(bool many_tokens, int expert_tile) {
  return many_tokens ? kernel_of<kWideX, kWideWeight, kRouterTokenGroup>(expert_tile)
                     : kernel_of<kWideX, kWideWeight, 1>(expert_tile);
}

}  // namespace

RouterKernel router_logits_kernel(bool wide_x, bool wide_weight, bool many_tokens,
                                  int expert_tile) {
  if (wide_x) {
    return wide_weight ? kernel_of<true, true>(many_tokens, expert_tile)
                       : kernel_of<true, false>(many_tokens, expert_tile);
  }
  return wide_weight ? kernel_of<false, true>(many_tokens, expert_tile)
                     : kernel_of<false, false>(many_tokens, expert_tile);
}

RouterKernel router_select_kernel() { return sm90_router_select; }

}  // namespace b12x
