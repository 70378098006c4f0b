// One-shot all-reduce, residual add and RMS norm in one launch: a block a row, which stays in
// registers from the push to the norm.
#include <algorithm>

#include "cuda/comm/packet.cuh"
#include "cuda/kernels/oneshot_all_reduce.h"

namespace b12x::comm {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;

struct RmsNormParams {
  const void* x;
  const void* residual;
  const void* weight;
  void* normed;
  void* new_residual;
  int64_t rows;
  int64_t hidden;
  float eps;
  const void* token;
  ChannelView view;
};

// The sum over the block, in the same order every time; all threads get it.
__device__ __forceinline__ float BlockSum(float value, float* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  __syncthreads();  // the row before has read `shared`
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int warps = (blockDim.x + kWarp - 1) / kWarp;
  const int lane = threadIdx.x % kWarp;
  float total = lane < warps ? shared[lane] : 0.0f;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(0xFFFFFFFFu, total, offset);
  }
  return total;
}

// kPackets: how many packets of a row a thread has.
template <typename T, int kWorldSize, int kPackets, bool kOrdered>
__global__ void __launch_bounds__(kMaxThreads, 1)
    AllReduceRmsNormKernel(const __grid_constant__ RmsNormParams params) {
  __shared__ float shared[kWarp];
  const ChannelView& view = ViewOf<kOrdered>(params);
  const int world_size = kWorldSize > 0 ? kWorldSize : view.world_size;

  constexpr int kElements = Packet<T>::kElements;
  const T* x = static_cast<const T*>(params.x);
  const T* residual = static_cast<const T*>(params.residual);
  const T* weight = static_cast<const T*>(params.weight);
  T* normed = static_cast<T*>(params.normed);
  T* new_residual = static_cast<T*>(params.new_residual);
  const int hidden = static_cast<int>(params.hidden);
  const int row_packets = (hidden + kElements - 1) / kElements;
  const bool aligned = ((reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(residual) |
                         reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(normed) |
                         reinterpret_cast<uintptr_t>(new_residual) | (hidden * sizeof(T))) %
                        kPacketBytes) == 0;

  bool poisoned;
  const uint32_t epoch = BeginEpoch(view, &poisoned);
  Packet<T> mine[kPackets];
  const auto load = [&](int64_t row) {
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const int packet = threadIdx.x + k * blockDim.x;
      if (packet < row_packets) {
        mine[k] = Sendable(LoadPacket(x + row * hidden + packet * kElements,
                                      hidden - packet * kElements, aligned));
      }
    }
  };
  // Rows begin at packets in the slot, whatever their length.
  const auto offset_of = [&](int64_t row, int packet) {
    return (row * row_packets + packet) * kPacketBytes;
  };
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    load(row);
    if (poisoned) continue;
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const int packet = threadIdx.x + k * blockDim.x;
      if (packet < row_packets) {
        PushPacket(view, world_size, epoch, offset_of(row, packet),
                   *reinterpret_cast<const uint4*>(&mine[k]));
      }
    }
  }
  __syncthreads();  // all threads have the epoch
  EndEpoch(view, epoch);

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    if (gridDim.x < params.rows) load(row);
    float sum[kPackets][kElements];
    Packet<T> scale_by[kPackets];
    float squares = 0.0f;
    Packet<T> skip[kPackets];
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {  // on their way while we wait
      const int packet = threadIdx.x + k * blockDim.x;
      if (packet < row_packets) {
        const int valid = hidden - packet * kElements;
        skip[k] = LoadPacket(residual + row * hidden + packet * kElements, valid, aligned);
        scale_by[k] = LoadPacket(weight + packet * kElements, valid, aligned);
      }
    }
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const int packet = threadIdx.x + k * blockDim.x;
      if (packet < row_packets) {
        const bool arrived = !poisoned && SumPacket<T>(view, world_size, epoch,
                                                       offset_of(row, packet), mine[k], sum[k]);
        Packet<T> added;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float value =
              arrived ? sum[k][i] + Widen(skip[k].elements[i]) : __int_as_float(0x7FC00000);
          added.elements[i] = Round<T>(value);
          const bool inside = packet * kElements + i < hidden;
          sum[k][i] = inside ? Widen(added.elements[i]) : 0.0f;
          squares += sum[k][i] * sum[k][i];
        }
        StorePacket(new_residual + row * hidden + packet * kElements, added,
                    hidden - packet * kElements, aligned);
      }
    }
    const float mean = BlockSum(squares, shared) / static_cast<float>(hidden);
    const float scale = 1.0f / sqrtf(mean + params.eps);
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const int packet = threadIdx.x + k * blockDim.x;
      if (packet < row_packets) {
        Packet<T> result;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          result.elements[i] = Round<T>(sum[k][i] * scale * Widen(scale_by[k].elements[i]));
        }
        StorePacket(normed + row * hidden + packet * kElements, result, hidden - packet * kElements,
                    aligned);
      }
    }
  }
}

template <typename T, int kWorldSize, bool kOrdered>
cudaError_t Launch(const RmsNormParams& params, cudaStream_t stream) {
  const int64_t row_packets = (params.hidden + Packet<T>::kElements - 1) / Packet<T>::kElements;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(params.rows, kMaxBlocks));
  const auto threads = [&](int packets) {
    const int64_t needed = (row_packets + packets - 1) / packets;
    return static_cast<unsigned>((needed + kWarp - 1) / kWarp * kWarp);
  };
  if (row_packets <= kMaxThreads) {
    AllReduceRmsNormKernel<T, kWorldSize, 1, kOrdered><<<grid, threads(1), 0, stream>>>(params);
  } else if (row_packets <= 2 * kMaxThreads) {
    AllReduceRmsNormKernel<T, kWorldSize, 2, kOrdered><<<grid, threads(2), 0, stream>>>(params);
  } else if (row_packets <= kMaxRowPackets) {
    AllReduceRmsNormKernel<T, kWorldSize, 8, kOrdered><<<grid, threads(8), 0, stream>>>(params);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchAs(const RmsNormParams& params, int world_size, cudaStream_t stream) {
  if (params.token != nullptr) {
    return world_size == 2 ? Launch<T, 2, true>(params, stream)
                           : Launch<T, 0, true>(params, stream);
  }
  return world_size == 2 ? Launch<T, 2, false>(params, stream)
                         : Launch<T, 0, false>(params, stream);
}

}  // namespace

cudaError_t LaunchAllReduceRmsNorm(FloatType type, const void* x, const void* residual,
                                   const void* weight, void* normed, void* new_residual,
                                   int64_t rows, int64_t hidden, float eps,
                                   const ChannelRef& channel, cudaStream_t stream) {
  const RmsNormParams params{x,    residual, weight, normed,        new_residual,
                             rows, hidden,   eps,    channel.token, channel.view};
  switch (type) {
    case FloatType::kF32:
      return LaunchAs<float>(params, channel.world_size, stream);
    case FloatType::kF16:
      return LaunchAs<__half>(params, channel.world_size, stream);
    case FloatType::kBF16:
      break;
  }
  return LaunchAs<__nv_bfloat16>(params, channel.world_size, stream);
}

}  // namespace b12x::comm
