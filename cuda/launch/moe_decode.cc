#include "cuda/launch/moe_decode.h"

#include <algorithm>

namespace b12x {
namespace {

constexpr int kMaxSharedBytes = 232448;  // 227 KB: what one CTA may have on SM90

const char* refusal(const MoeDecodeParams& p) {
  const MoeDecodeGeometry& g = p.geometry;
  auto split_ok = [](int32_t split) { return split >= 1 && split <= kMoeDecodeWarps; };
  if (p.top_k < 1 || p.top_k > kMoeMaxTopK) return "top_k must be between 1 and 16";
  if (p.num_experts < 1 || p.num_experts > kMoeMaxExperts) {
    return "num_experts must be between 1 and 1024";
  }
  if (p.hidden < 16 || p.hidden % 16 != 0) return "hidden must be a multiple of 16";
  if (p.intermediate < 16 || p.intermediate % 16 != 0)
    return "intermediate must be a multiple of 16";
  const MoeDecodeShape shape = ShapeOf(p.hidden, p.intermediate);
  const int64_t items = int64_t{std::min(p.num_tokens, kMoeMaxTokens)} * p.top_k;
  if (items * std::max(shape.fc1_row_tiles, shape.fc2_row_tiles) >= 1 << 24) {
    return "num_tokens * top_k * hidden (or intermediate) is too large for one launch";
  }
  if (g.grid < 1 || g.grid > kMoeMaxGrid) return "geometry.grid must be between 1 and 4096";
  if (g.stages < 1 || g.stages > 12) return "geometry.stages must be between 1 and 12";
  if (!split_ok(g.fc1_split)) return "geometry.fc1_split must be between 1 and 16";
  if (!split_ok(g.fc2_split)) return "geometry.fc2_split must be between 1 and 16";
  if (g.fc2_order != Fc2Order::kOwner && g.fc2_order != Fc2Order::kExpert) {
    return "geometry.fc2_order must be 0 (owner) or 1 (expert)";
  }
  return nullptr;
}

cudaError_t launch_kernel(MoeDecodeKernel kernel, const MoeDecodeParams& params, int shared_bytes,
                          cudaStream_t stream, cudaLaunchAttributeID attribute_id,
                          int threads = kMoeDecodeLaunchThreads) {
  // Idempotent and cheap; a capture allows it.
  if (cudaError_t e =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes)) {
    return e;
  }
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.geometry.grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  if (attribute_id == cudaLaunchAttributeCooperative) {
    attribute.id = attribute_id;
    attribute.val.cooperative = 1;
  } else if (attribute_id == cudaLaunchAttributeProgrammaticStreamSerialization) {
    attribute.id = attribute_id;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = &attribute;
  config.numAttrs = attribute_id == cudaLaunchAttributeIgnore ? 0 : 1;
  void* arguments[] = {const_cast<MoeDecodeParams*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

cudaError_t launch_group(const MoeDecodeParams& params, DecodeRecipeId recipe, DecodeLaunch launch,
                         int shared_bytes, cudaStream_t stream, DecodeResidency residency) {
  if (launch == DecodeLaunch::kFused) {
    return launch_kernel(fused_kernel(recipe, params.plan), params, shared_bytes, stream,
                         residency == DecodeResidency::kCooperative ? cudaLaunchAttributeCooperative
                                                                    : cudaLaunchAttributeIgnore);
  }
  const SplitKernels kernels = split_kernels(recipe);
  constexpr auto kOverlap = cudaLaunchAttributeProgrammaticStreamSerialization;
  cudaError_t e = cudaSuccess;
  auto first = cudaLaunchAttributeIgnore;
  if (kernels.quantize != nullptr && !params.plan.input_in_shared) {
    e = launch_kernel(kernels.quantize, params, 0, stream, cudaLaunchAttributeIgnore,
                      kMoeDecodeThreads);
    first = kOverlap;
  }
  if (e == cudaSuccess) e = launch_kernel(kernels.fc1, params, shared_bytes, stream, first);
  if (e == cudaSuccess) e = launch_kernel(kernels.fc2, params, shared_bytes, stream, kOverlap);
  if (e == cudaSuccess && params.geometry.fc2_order == Fc2Order::kExpert) {
    e = launch_kernel(kernels.sum, params, shared_bytes, stream, kOverlap, kMoeDecodeThreads);
  }
  return e;
}

}  // namespace

MoeDecodeScratch moe_decode_scratch(int32_t num_tokens, int32_t top_k, int32_t hidden,
                                    int32_t intermediate, bool quantized,
                                    const MoeDecodeGeometry& geometry) {
  const MoeDecodeShape shape = ShapeOf(hidden, intermediate);
  const int64_t rows = int64_t{std::min(num_tokens, kMoeMaxTokens)} * top_k;
  MoeDecodeScratch scratch{};
  scratch.h_bytes = rows * shape.fc2_k_tiles * 128 * 2;
  if (geometry.fc2_order == Fc2Order::kExpert)
    scratch.y_bytes = rows * shape.fc2_row_tiles * 16 * 4;
  const int32_t tokens = std::min(num_tokens, kMoeMaxTokens);
  if (quantized && tokens > kMoeSharedInputTokens) {
    scratch.input_bytes = int64_t{tokens} * shape.fc1_k_tiles * 128 * 2;
  }
  return scratch;
}

LaunchStatus launch_moe_decode(MoeDecodeParams params, DecodeRecipeId recipe, DecodeLaunch launch,
                               void* scratch, int64_t scratch_bytes, cudaStream_t stream,
                               DecodeResidency residency) {
  if (const char* reason = refusal(params)) return {cudaErrorInvalidValue, reason};
  if (launch == DecodeLaunch::kFused && params.barrier.word == nullptr) {
    return {cudaErrorInvalidValue, "a fused launch needs the word of a grid barrier"};
  }
  const int32_t num_tokens = params.num_tokens;
  const bool quantized = recipe == DecodeRecipeId::kNvfp4;
  const MoeDecodeScratch sizes = moe_decode_scratch(
      num_tokens, params.top_k, params.hidden, params.intermediate, quantized, params.geometry);
  if (scratch_bytes < sizes.bytes()) return {cudaErrorInvalidValue, "scratch is too small"};
  params.h = scratch;
  params.y = reinterpret_cast<float*>(static_cast<char*>(scratch) + sizes.h_bytes);
  params.input = static_cast<char*>(scratch) + sizes.h_bytes + sizes.y_bytes;
  const auto* x = static_cast<const uint16_t*>(params.x);
  auto* out = static_cast<uint16_t*>(params.out);
  for (int32_t first = 0; first < num_tokens; first += kMoeMaxTokens) {
    MoeDecodeParams group = params;
    group.num_tokens = std::min(kMoeMaxTokens, num_tokens - first);
    group.x = x + int64_t{first} * params.hidden;
    group.out = out + int64_t{first} * params.hidden;
    group.topk_ids = params.topk_ids + int64_t{first} * params.top_k;
    group.topk_weights = params.topk_weights + int64_t{first} * params.top_k;
    group.plan = PlanOf(group.num_tokens, group.top_k, group.hidden, group.intermediate, quantized,
                        group.geometry);
    if (group.plan.shared.bytes > kMaxSharedBytes) {
      return {cudaErrorInvalidValue, "the geometry needs more shared memory than a CTA may have"};
    }
    if (cudaError_t e =
            launch_group(group, recipe, launch, group.plan.shared.bytes, stream, residency)) {
      return {e, nullptr};
    }
  }
  return {};
}

}  // namespace b12x
