// Launchers of the one-shot all-reduce: plain pointers, shapes and a stream.
#ifndef JAX_B12X_CUDA_KERNELS_ONESHOT_ALL_REDUCE_H_
#define JAX_B12X_CUDA_KERNELS_ONESHOT_ALL_REDUCE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/comm/channel.h"

namespace b12x::comm {

// out[i] = sum over the ranks of x[i], in fp32 in rank order, rounded once.
cudaError_t LaunchAllReduce(FloatType type, const void* x, void* out, int64_t count,
                            const ChannelRef& channel, cudaStream_t stream);

// new_residual = round(sum of x over the ranks + residual); normed = round(new_residual *
// rsqrt(mean(new_residual^2) + eps) * weight). Rows of up to kMaxRowPackets packets.
inline constexpr int64_t kMaxRowPackets = 8192;
cudaError_t LaunchAllReduceRmsNorm(FloatType type, const void* x, const void* residual,
                                   const void* weight, void* normed, void* new_residual,
                                   int64_t rows, int64_t hidden, float eps,
                                   const ChannelRef& channel, cudaStream_t stream);

// Writes the address of `view`, which is in device memory, into the token.
cudaError_t LaunchOpenOrder(const ChannelView* view, void* token, cudaStream_t stream);

}  // namespace b12x::comm

#endif  // JAX_B12X_CUDA_KERNELS_ONESHOT_ALL_REDUCE_H_
