#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kernels/add.h"

namespace b12x {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements a thread: 16 bytes

__device__ __forceinline__ __nv_bfloat162 sum(__nv_bfloat162 a, __nv_bfloat162 b) {
  const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b);
  return __floats2bfloat162_rn(x.x + y.x, x.y + y.y);
}
__device__ __forceinline__ __half2 sum(__half2 a, __half2 b) {
  const float2 x = __half22float2(a), y = __half22float2(b);
  return __floats2half2_rn(x.x + y.x, x.y + y.y);
}

template <typename Pair>
__global__ void __launch_bounds__(kThreads)
    add(const uint4* __restrict__ a, const uint4* __restrict__ b, uint4* __restrict__ out,
        int64_t vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const uint4 a_bits = a[i], b_bits = b[i];
  uint4 out_bits;
  const auto* a_pairs = reinterpret_cast<const Pair*>(&a_bits);
  const auto* b_pairs = reinterpret_cast<const Pair*>(&b_bits);
  auto* out_pairs = reinterpret_cast<Pair*>(&out_bits);
#pragma unroll
  for (int j = 0; j < kVector / 2; ++j) out_pairs[j] = sum(a_pairs[j], b_pairs[j]);
  out[i] = out_bits;
}

}  // namespace

LaunchStatus launch_add(const void* a, const void* b, void* out, int64_t count, bool fp16,
                        cudaStream_t stream) {
  if (count < 0 || count % kVector != 0) {
    return {cudaErrorInvalidValue, "the number of elements must be a multiple of 8"};
  }
  if (count == 0) return {};
  const int64_t vectors = count / kVector;
  const auto grid = static_cast<unsigned>((vectors + kThreads - 1) / kThreads);
  const auto* a_vectors = static_cast<const uint4*>(a);
  const auto* b_vectors = static_cast<const uint4*>(b);
  auto* out_vectors = static_cast<uint4*>(out);
  if (fp16) {
    add<__half2><<<grid, kThreads, 0, stream>>>(a_vectors, b_vectors, out_vectors, vectors);
  } else {
    add<__nv_bfloat162><<<grid, kThreads, 0, stream>>>(a_vectors, b_vectors, out_vectors, vectors);
  }
  return {cudaGetLastError(), nullptr};
}

}  // namespace b12x
