// Every rank pushes its heads to every peer and puts what it is sent next to its own, in one
// launch. Bytes are copied, whatever they mean; only a word of all ones, which marks an empty slot,
// travels as another NaN of the same dtype.
#include <algorithm>

#include "cuda/comm/packet.cuh"
#include "cuda/kernels/dcp.h"

namespace b12x::comm {
namespace {

constexpr int kThreads = 256;

struct GatherParams {
  GatherTensor tensors[2];
  const void* token;
  ChannelView view;
};

// A row need not be whole packets: the halves of a packet may belong to two rows.
constexpr int64_t kHalf = kPacketBytes / 2;

// Whether whole packets may be loaded and stored.
__device__ __forceinline__ bool Wide(const GatherTensor& tensor) {
  return ((reinterpret_cast<uintptr_t>(tensor.part) | reinterpret_cast<uintptr_t>(tensor.whole) |
           static_cast<uintptr_t>(tensor.row_bytes)) %
          kPacketBytes) == 0;
}

// Where byte `offset` of the part of `source` is in the whole.
__device__ __forceinline__ unsigned char* PlaceOf(const GatherTensor& tensor, int64_t offset,
                                                  int world_size, int source) {
  const int64_t row = offset / tensor.row_bytes;
  const int64_t within = offset - row * tensor.row_bytes;
  return static_cast<unsigned char*>(tensor.whole) +
         (row * world_size + source) * tensor.row_bytes + within;
}

__device__ __forceinline__ uint4 LoadPart(const GatherTensor& tensor, int64_t offset) {
  const auto* at = static_cast<const unsigned char*>(tensor.part) + offset;
  if (Wide(tensor)) return *reinterpret_cast<const uint4*>(at);
  const uint2 low = *reinterpret_cast<const uint2*>(at);
  uint2 high = make_uint2(0, 0);
  if (offset + kHalf < tensor.bytes) high = *reinterpret_cast<const uint2*>(at + kHalf);
  return make_uint4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ void StoreWhole(const GatherTensor& tensor, int64_t offset,
                                           int world_size, int source, uint4 words) {
  unsigned char* at = PlaceOf(tensor, offset, world_size, source);
  if (Wide(tensor)) {
    *reinterpret_cast<uint4*>(at) = words;
    return;
  }
  *reinterpret_cast<uint2*>(at) = make_uint2(words.x, words.y);
  if (offset + kHalf < tensor.bytes) {
    at = PlaceOf(tensor, offset + kHalf, world_size, source);
    *reinterpret_cast<uint2*>(at) = make_uint2(words.z, words.w);
  }
}

// kWorldSize: 0 reads it at run time.
template <int kWorldSize, bool kOrdered>
__global__ void __launch_bounds__(kThreads, kBlocksOnSm)
    DcpGatherKernel(const __grid_constant__ GatherParams params) {
  const ChannelView& view = ViewOf<kOrdered>(params);
  const int world_size = kWorldSize > 0 ? kWorldSize : view.world_size;
  const int64_t first_packets = GatherSlotBytes(params.tensors[0].bytes) / kPacketBytes;
  const int64_t packets = first_packets + GatherSlotBytes(params.tensors[1].bytes) / kPacketBytes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto tensor_of = [&](int64_t packet) -> const GatherTensor& {
    return params.tensors[packet < first_packets ? 0 : 1];
  };
  const auto offset_of = [&](int64_t packet) {
    return (packet < first_packets ? packet : packet - first_packets) * kPacketBytes;
  };

  bool poisoned;
  const uint32_t epoch = BeginEpoch(view, &poisoned);
  for (int64_t packet = first; packet < packets; packet += stride) {
    const GatherTensor& tensor = tensor_of(packet);
    const uint4 words = LoadPart(tensor, offset_of(packet));
    if (!poisoned) {
      PushPacket(
          view, world_size, epoch, packet * kPacketBytes,
          make_uint4(NotEmpty(words.x), NotEmpty(words.y), NotEmpty(words.z), NotEmpty(words.w)));
    }
    StoreWhole(tensor, offset_of(packet), world_size, view.rank, words);
  }
  __syncthreads();  // all threads have the epoch
  EndEpoch(view, epoch);

  for (int64_t packet = first; packet < packets; packet += stride) {
    const GatherTensor& tensor = tensor_of(packet);
    for (int source = 0; source < world_size; ++source) {
      if (source == view.rank && !poisoned) continue;
      uint4 words;
      const bool arrived = !poisoned && TakePacket(view,
                                                   view.slabs[view.rank] +
                                                       SlotOffset(view.slot_bytes, world_size,
                                                                  epoch, view.rank, source) +
                                                       packet * kPacketBytes,
                                                   source, &words);
      if (!arrived) words = make_uint4(kOtherNan, kOtherNan, kOtherNan, kOtherNan);
      StoreWhole(tensor, offset_of(packet), world_size, source, words);
    }
  }
}

}  // namespace

cudaError_t LaunchDcpGather(const GatherTensor& first, const GatherTensor& second,
                            const ChannelRef& channel, cudaStream_t stream) {
  const GatherParams params{{first, second}, channel.token, channel.view};
  const int64_t packets =
      (GatherSlotBytes(first.bytes) + GatherSlotBytes(second.bytes)) / kPacketBytes;
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>((packets + kThreads - 1) / kThreads, kMaxBlocks));
  if (params.token != nullptr) {
    channel.world_size == 2 ? DcpGatherKernel<2, true><<<grid, kThreads, 0, stream>>>(params)
                            : DcpGatherKernel<0, true><<<grid, kThreads, 0, stream>>>(params);
  } else {
    channel.world_size == 2 ? DcpGatherKernel<2, false><<<grid, kThreads, 0, stream>>>(params)
                            : DcpGatherKernel<0, false><<<grid, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace b12x::comm
