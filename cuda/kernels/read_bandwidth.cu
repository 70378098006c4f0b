// Reads memory as fast as it goes: the ceiling that decode is measured against.
#include "cuda/kernels/read_bandwidth.h"
#include "cuda/ptx/memory.cuh"

namespace b12x {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 8;  // 16-byte loads in flight a thread

__global__ void __launch_bounds__(kThreads, 2)
    read_bandwidth(const uint4* __restrict__ data, int64_t count, uint32_t* sink) {
  uint32_t seen = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kUnroll;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads * kUnroll + threadIdx.x; i < count;
       i += stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = i + u * kThreads;
      v[u] = at < count ? __ldcs(data + at) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) seen |= v[u].x & v[u].y & v[u].z & v[u].w;
  }
  // Keeps the loads alive: a thread that saw all ones and only ones has something to say.
  if (seen == 0xFFFFFFFFu) *sink = seen;
}

}  // namespace

cudaError_t launch_read_bandwidth(const void* data, int64_t bytes, uint32_t* sink,
                                  cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e =
          cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) {
    return e;
  }
  read_bandwidth<<<2 * multiprocessors, kThreads, 0, stream>>>(static_cast<const uint4*>(data),
                                                               bytes / 16, sink);
  return cudaGetLastError();
}

}  // namespace b12x
