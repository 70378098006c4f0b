// One-shot all-reduce: every rank pushes its message to every peer and sums what it is sent, in one
// launch. A packet is pushed and awaited by the same thread index on every rank; no block waits for
// another block of its own grid.
#include <algorithm>

#include "cuda/comm/packet.cuh"
#include "cuda/kernels/oneshot_all_reduce.h"

namespace b12x::comm {
namespace {

constexpr int kThreads = 256;
// Up to this many packets a thread keeps in registers between pushing and adding them.
constexpr int kMaxKept = 4;

struct AllReduceParams {
  const void* x;
  void* out;
  int64_t count;
  const void* token;
  ChannelView view;
};

// kWorldSize: 0 reads it at run time. kKept: 0 reads x a second time instead of keeping it.
template <typename T, int kWorldSize, int kKept, bool kOrdered>
__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    AllReduceKernel(const __grid_constant__ AllReduceParams params) {
  static_assert(kKept <= kMaxKept);
  const ChannelView& view = ViewOf<kOrdered>(params);
  const int world_size = kWorldSize > 0 ? kWorldSize : view.world_size;

  const T* x = static_cast<const T*>(params.x);
  T* out = static_cast<T*>(params.out);
  constexpr int kElements = Packet<T>::kElements;
  const int64_t packets = (params.count + kElements - 1) / kElements;
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % kPacketBytes) == 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto valid = [&](int64_t packet) {
    return static_cast<int>(
        min(params.count - packet * kElements, static_cast<int64_t>(kElements)));
  };

  bool poisoned;
  const uint32_t epoch = BeginEpoch(view, &poisoned);
  Packet<T> kept[kKept > 0 ? kKept : 1];
  if constexpr (kKept > 0) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t packet = first + k * stride;
      if (packet < packets) {
        kept[k] = Sendable(LoadPacket(x + packet * kElements, valid(packet), aligned));
      }
    }
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t packet = first + k * stride;
      if (packet < packets && !poisoned) {
        PushPacket(view, world_size, epoch, packet * kPacketBytes,
                   *reinterpret_cast<const uint4*>(&kept[k]));
      }
    }
  } else if (!poisoned) {
    for (int64_t packet = first; packet < packets; packet += stride) {
      const Packet<T> mine = Sendable(LoadPacket(x + packet * kElements, valid(packet), aligned));
      PushPacket(view, world_size, epoch, packet * kPacketBytes,
                 *reinterpret_cast<const uint4*>(&mine));
    }
  }
  __syncthreads();  // all threads have the epoch
  EndEpoch(view, epoch);

  const auto finish = [&](int64_t packet, const Packet<T>& mine) {
    float sum[kElements];
    const bool arrived =
        !poisoned && SumPacket<T>(view, world_size, epoch, packet * kPacketBytes, mine, sum);
    Packet<T> result;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      result.elements[i] = Round<T>(arrived ? sum[i] : __int_as_float(0x7FC00000));
    }
    StorePacket(out + packet * kElements, result, valid(packet), aligned);
  };
  if constexpr (kKept > 0) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t packet = first + k * stride;
      if (packet < packets) finish(packet, kept[k]);
    }
  } else {
    // x and out may be one buffer: a thread has read all that it pushes, and reads each packet
    // again before it overwrites it.
    for (int64_t packet = first; packet < packets; packet += stride) {
      finish(packet, Sendable(LoadPacket(x + packet * kElements, valid(packet), aligned)));
    }
  }
}

template <typename T, int kWorldSize, bool kOrdered>
void Launch(const AllReduceParams& params, cudaStream_t stream) {
  constexpr int kElements = Packet<T>::kElements;
  const int64_t packets = (params.count + kElements - 1) / kElements;
  const int64_t blocks = (packets + kThreads - 1) / kThreads;
  // One packet a thread for as long as the blocks are few.
  const auto grid = [&](int64_t kept) { return static_cast<unsigned>((blocks + kept - 1) / kept); };
  if (blocks <= kMaxBlocks) {
    AllReduceKernel<T, kWorldSize, 1, kOrdered><<<grid(1), kThreads, 0, stream>>>(params);
  } else if (blocks <= 2 * kMaxBlocks) {
    AllReduceKernel<T, kWorldSize, 2, kOrdered><<<grid(2), kThreads, 0, stream>>>(params);
  } else if (blocks <= kMaxKept * kMaxBlocks) {
    AllReduceKernel<T, kWorldSize, kMaxKept, kOrdered>
        <<<grid(kMaxKept), kThreads, 0, stream>>>(params);
  } else {
    AllReduceKernel<T, 0, 0, kOrdered><<<kMaxBlocks, kThreads, 0, stream>>>(params);
  }
}

template <typename T>
void LaunchAs(const AllReduceParams& params, int world_size, cudaStream_t stream) {
  if (params.token != nullptr) {
    world_size == 2 ? Launch<T, 2, true>(params, stream) : Launch<T, 0, true>(params, stream);
  } else if (world_size == 2) {
    Launch<T, 2, false>(params, stream);
  } else {
    Launch<T, 0, false>(params, stream);
  }
}

__global__ void OpenOrderKernel(const ChannelView* view, void* token) {
  static_cast<const ChannelView**>(token)[0] = view;
  static_cast<const ChannelView**>(token)[1] = nullptr;
}

}  // namespace

cudaError_t LaunchAllReduce(FloatType type, const void* x, void* out, int64_t count,
                            const ChannelRef& channel, cudaStream_t stream) {
  const AllReduceParams params{x, out, count, channel.token, channel.view};
  switch (type) {
    case FloatType::kF32:
      LaunchAs<float>(params, channel.world_size, stream);
      break;
    case FloatType::kF16:
      LaunchAs<__half>(params, channel.world_size, stream);
      break;
    case FloatType::kBF16:
      LaunchAs<__nv_bfloat16>(params, channel.world_size, stream);
      break;
  }
  return cudaGetLastError();
}

cudaError_t LaunchOpenOrder(const ChannelView* view, void* token, cudaStream_t stream) {
  OpenOrderKernel<<<1, 1, 0, stream>>>(view, token);
  return cudaGetLastError();
}

}  // namespace b12x::comm
