#include "cuda/launch/dense_mlp.h"

#include <algorithm>

#include "cuda/kernels/sm90_dense_mlp.h"
#include "cuda/moe/params.h"

namespace b12x {
namespace {

const char* refusal(const DenseMlpParams& p) {
  if (p.num_tokens < 0) return "num_tokens must not be negative";
  if (p.hidden < 16 || p.hidden % 16 != 0) return "hidden must be a multiple of 16";
  if (p.intermediate < 16 || p.intermediate % 16 != 0) {
    return "intermediate must be a multiple of 16";
  }
  return nullptr;
}

int64_t h_bytes(int32_t tokens, int32_t intermediate) { return int64_t{tokens} * intermediate * 2; }

// How many warps share the columns, as measured: about 2 to 24 steps for each. It depends on the
// shape alone, and so does the order of the sums.
int warps_for(const DenseMlpProduct& product, int columns) {
  const int steps = CeilDiv(columns, 32);
  return std::min(product.max_warps, steps < 16 ? 4 : steps <= 24 * 8 ? 8 : 16);
}

cudaError_t launch_product(const DenseMlpProduct& product, const DenseMlpLaunch& launch, int tiles,
                           int columns, int extra_ctas, bool after_first, cudaStream_t stream) {
  const int ctas = CeilDiv(tiles, product.row_tiles);
  const int warps = warps_for(product, columns);
  const int shared_bytes = warps * product.bytes_per_warp;
  const void* const kernel = reinterpret_cast<const void*>(product.kernel);
  // Idempotent and cheap; a capture allows it.
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           product.max_warps * product.bytes_per_warp)) {
    return e;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas + extra_ctas);
  config.blockDim = dim3(32 * warps);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = after_first ? 1 : 0;
  void* arguments[] = {const_cast<DenseMlpLaunch*>(&launch)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace

int64_t dense_mlp_scratch_bytes(int32_t num_tokens, int32_t /*hidden*/, int32_t intermediate) {
  const int32_t tokens = std::min(num_tokens, kDenseMlpMaxTokens);
  return h_bytes(tokens, intermediate) + tokens * int64_t{sizeof(float)};
}

LaunchStatus launch_dense_mlp(const DenseMlpParams& params, void* scratch, int64_t scratch_bytes,
                              cudaStream_t stream) {
  if (const char* reason = refusal(params)) return {cudaErrorInvalidValue, reason};
  if (scratch_bytes <
      dense_mlp_scratch_bytes(params.num_tokens, params.hidden, params.intermediate)) {
    return {cudaErrorInvalidValue, "scratch is too small"};
  }
  const int extra_ctas = params.shared_gate == nullptr ? 0 : 1;
  for (int32_t first = 0; first < params.num_tokens; first += kDenseMlpMaxTokens) {
    const int32_t tokens = std::min(kDenseMlpMaxTokens, params.num_tokens - first);
    DenseMlpLaunch launch{params, scratch, nullptr};
    const int64_t offset = int64_t{first} * params.hidden;
    launch.params.x = static_cast<const uint16_t*>(params.x) + offset;
    launch.params.out = static_cast<uint16_t*>(params.out) + offset;
    launch.params.num_tokens = tokens;
    launch.gates = reinterpret_cast<float*>(static_cast<char*>(scratch) +
                                            h_bytes(tokens, params.intermediate));
    cudaError_t e = launch_product(dense_mlp_fc1(params.fp16, tokens), launch,
                                   params.intermediate / 8, params.hidden, extra_ctas,
                                   /*after_first=*/false, stream);
    if (e == cudaSuccess) {
      e = launch_product(dense_mlp_fc2(params.fp16, tokens), launch, params.hidden / 16,
                         params.intermediate, 0, /*after_first=*/true, stream);
    }
    if (e != cudaSuccess) return {e, nullptr};
  }
  return {};
}

}  // namespace b12x
