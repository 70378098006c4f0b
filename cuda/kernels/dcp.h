// Launchers of the exchanges of decode context parallelism: plain pointers, shapes and a stream.
#ifndef JAX_B12X_CUDA_KERNELS_DCP_H_
#define JAX_B12X_CUDA_KERNELS_DCP_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/comm/channel.h"
#include "cuda/comm/dcp_layout.h"

namespace b12x::comm {

struct CombineArrays {
  const void* partial = nullptr;  // [outer, world_size, inner, head_dim]
  const float* lse = nullptr;     // [outer, world_size, inner]
  void* out = nullptr;            // [outer, inner, head_dim]
  float* out_lse = nullptr;       // [outer, inner], or null
};

// out = sum over ranks, in rank order, of softmax(lse) * partial, in fp32, rounded once. A row
// whose LSE is not finite counts as nothing; where all are such, the result is 0 and its LSE -inf.
// head_dim is a multiple of 8.
cudaError_t LaunchDcpCombine(FloatType type, const CombineArrays& arrays, const HeadRows& rows,
                             int64_t head_dim, bool base_two, const ChannelRef& channel,
                             cudaStream_t stream);

struct GatherTensor {
  const void* part = nullptr;  // [bytes / row_bytes, row_bytes]
  void* whole = nullptr;       // [bytes / row_bytes, world_size, row_bytes]
  int64_t bytes = 0;           // of the part
  int64_t row_bytes = 8;       // a multiple of 8
};

// Copies the ranks' parts next to each other. A second tensor of no bytes is none.
cudaError_t LaunchDcpGather(const GatherTensor& first, const GatherTensor& second,
                            const ChannelRef& channel, cudaStream_t stream);

}  // namespace b12x::comm

#endif  // JAX_B12X_CUDA_KERNELS_DCP_H_
