// Every rank pushes each head's partial attention and its LSE to the rank that the head belongs to,
// and combines what it is sent, in one launch: a warp a row (one token's head). The warp with the
// same index on every rank pushes a row and awaits it; no block waits for another of its own grid.
#include <algorithm>

#include "cuda/comm/packet.cuh"
#include "cuda/kernels/dcp.h"

namespace b12x::comm {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 4;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
// So many packets of a lane are on their way while the warp waits for the LSEs.
constexpr int kEarly = 2;

struct CombineParams {
  CombineArrays arrays;
  HeadRows rows;
  int32_t head_dim;
  bool base_two;
  const void* token;
  ChannelView view;
};

__device__ __forceinline__ float WarpMax(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Turns the LSE of rank `lane`, which may be anything in other lanes, into its weight: 0 where the
// shard is empty. Sums in rank order.
__device__ __forceinline__ float Weigh(float lse, int lane, int world_size, bool base_two,
                                       float* weight) {
  const bool present = lane < world_size && isfinite(lse);
  const float highest = WarpMax(present ? lse : -INFINITY);
  if (highest == -INFINITY) {
    *weight = 0.0f;
    return -INFINITY;
  }
  const float distance = lse - highest;
  const float share = present ? (base_two ? exp2f(distance) : expf(distance)) : 0.0f;
  float total = 0.0f;
  for (int rank = 0; rank < world_size; ++rank) total += __shfl_sync(kAllLanes, share, rank);
  *weight = share / total;
  return highest + (base_two ? log2f(total) : logf(total));
}

// kWorldSize: 0 reads it at run time.
template <typename T, int kWorldSize, bool kOrdered>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    DcpCombineKernel(const __grid_constant__ CombineParams params) {
  static_assert(kMaxRanks <= kWarp);
  constexpr int kElements = Packet<T>::kElements;
  __shared__ float shared_weights[kMaxWarps][kMaxRanks];
  __shared__ uint32_t shared_present[kMaxWarps];

  const ChannelView& view = ViewOf<kOrdered>(params);
  const int world_size = kWorldSize > 0 ? kWorldSize : view.world_size;
  const CombineArrays& arrays = params.arrays;
  const HeadRows& rows = params.rows;
  const T* partial = static_cast<const T*>(arrays.partial);
  T* out = static_cast<T*>(arrays.out);
  const int head_dim = params.head_dim;
  const int packets = head_dim / kElements;
  const int64_t row_bytes = CombineRowBytes(head_dim, sizeof(T));
  const bool aligned = ((reinterpret_cast<uintptr_t>(partial) | reinterpret_cast<uintptr_t>(out)) %
                        kPacketBytes) == 0;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps + warp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * warps;

  bool poisoned;
  const uint32_t epoch = BeginEpoch(view, &poisoned);
  for (int64_t row = first; row < rows.count() && !poisoned; row += stride) {
    // Ranks begin with different peers, so that not all send to the same one at a time.
    for (int step = 1; step < world_size; ++step) {
      int peer = view.rank + step;
      if (peer >= world_size) peer -= world_size;
      const int64_t in_whole = rows.InWhole(row, peer);
      unsigned char* slot = view.slabs[peer] +
                            SlotOffset(view.slot_bytes, world_size, epoch, peer, view.rank) +
                            row * row_bytes;
      if (lane == 0) {
        const uint32_t lse = NotEmpty(__float_as_uint(arrays.lse[in_whole]));
        StoreVolatile(slot, make_uint4(lse, 0, 0, 0));
      }
      for (int packet = lane; packet < packets; packet += kWarp) {
        const Packet<T> mine = Sendable(
            LoadPacket(partial + in_whole * head_dim + packet * kElements, kElements, aligned));
        StoreVolatile(slot + kLsePacketBytes + packet * kPacketBytes,
                      *reinterpret_cast<const uint4*>(&mine));
      }
    }
  }
  __syncthreads();  // all threads have the epoch
  EndEpoch(view, epoch);

  const auto slot_of = [&](int source, int64_t row) {
    return view.slabs[view.rank] +
           SlotOffset(view.slot_bytes, world_size, epoch, view.rank, source) + row * row_bytes;
  };
  for (int64_t row = first; row < rows.count(); row += stride) {
    const int64_t in_whole = rows.InWhole(row, view.rank);
    // On their way while we wait: our own packets, and of two ranks the other's as well.
    Packet<T> mine[kEarly];
    uint4 theirs[kEarly];
#pragma unroll
    for (int k = 0; k < kEarly; ++k) {
      const int packet = lane + k * kWarp;
      theirs[k] = make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
      if (packet < packets) {
        mine[k] =
            LoadPacket(partial + in_whole * head_dim + packet * kElements, kElements, aligned);
        if constexpr (kWorldSize == 2) {
          if (!poisoned) {
            theirs[k] =
                LoadVolatile(slot_of(1 - view.rank, row) + kLsePacketBytes + packet * kPacketBytes);
          }
        }
      }
    }

    float lse = -INFINITY;
    bool arrived = !poisoned;
    if (lane == view.rank) {
      lse = arrays.lse[in_whole];
    } else if (lane < world_size && !poisoned) {
      uint4 words;
      arrived = TakePacket(view, slot_of(lane, row), lane, &words);
      lse = __uint_as_float(words.x);
    }
    arrived = __all_sync(kAllLanes, arrived);
    float weight;
    const float combined = Weigh(lse, lane, world_size, params.base_two, &weight);
    const uint32_t present = __ballot_sync(kAllLanes, lane < world_size && isfinite(lse));
    if (lane < world_size) shared_weights[warp][lane] = weight;
    if (lane == 0) {
      shared_present[warp] = present;
      if (arrays.out_lse != nullptr) {
        arrays.out_lse[row] = arrived ? combined : __uint_as_float(kOtherNan);
      }
    }
    __syncwarp();

    const auto finish = [&](int packet, const Packet<T>& own, uint4 early) {
      float sum[kElements] = {};
      bool complete = arrived;
      for (int source = 0; source < world_size && complete; ++source) {
        Packet<T> part = own;
        if (source != view.rank) {
          unsigned char* at = slot_of(source, row) + kLsePacketBytes + packet * kPacketBytes;
          uint4& words = *reinterpret_cast<uint4*>(&part);
          words = early;
          if (kWorldSize == 2 && Complete(words)) {
            StoreVolatile(at, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
          } else {
            complete = TakePacket(view, at, source, &words);
          }
        }
        if ((shared_present[warp] >> source & 1) == 0) continue;  // it may hold NaN
        const float by = shared_weights[warp][source];
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] += by * Widen(part.elements[i]);
      }
      Packet<T> result;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        result.elements[i] = Round<T>(complete ? sum[i] : __uint_as_float(kOtherNan));
      }
      StorePacket(out + row * head_dim + packet * kElements, result, kElements, aligned);
    };
#pragma unroll
    for (int k = 0; k < kEarly; ++k) {
      if (lane + k * kWarp < packets) finish(lane + k * kWarp, mine[k], theirs[k]);
    }
    for (int packet = lane + kEarly * kWarp; packet < packets; packet += kWarp) {
      const Packet<T> own =
          LoadPacket(partial + in_whole * head_dim + packet * kElements, kElements, aligned);
      finish(packet, own, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
    }
    __syncwarp();  // the next row overwrites the weights
  }
}

template <typename T>
void Launch(const CombineParams& params, int world_size, cudaStream_t stream) {
  // One warp a block while rows are few, so that they are spread over the multiprocessors.
  constexpr int64_t kFewRows = 128;
  const int64_t rows = params.rows.count();
  const int warps = rows <= kFewRows ? 1 : kMaxWarps;
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>((rows + warps - 1) / warps, kMaxBlocks));
  const unsigned threads = warps * kWarp;
  if (params.token != nullptr) {
    world_size == 2 ? DcpCombineKernel<T, 2, true><<<grid, threads, 0, stream>>>(params)
                    : DcpCombineKernel<T, 0, true><<<grid, threads, 0, stream>>>(params);
  } else {
    world_size == 2 ? DcpCombineKernel<T, 2, false><<<grid, threads, 0, stream>>>(params)
                    : DcpCombineKernel<T, 0, false><<<grid, threads, 0, stream>>>(params);
  }
}

}  // namespace

cudaError_t LaunchDcpCombine(FloatType type, const CombineArrays& arrays, const HeadRows& rows,
                             int64_t head_dim, bool base_two, const ChannelRef& channel,
                             cudaStream_t stream) {
  const CombineParams params{arrays,   rows,          static_cast<int32_t>(head_dim),
                             base_two, channel.token, channel.view};
  switch (type) {
    case FloatType::kF32:
      Launch<float>(params, channel.world_size, stream);
      break;
    case FloatType::kF16:
      Launch<__half>(params, channel.world_size, stream);
      break;
    case FloatType::kBF16:
      Launch<__nv_bfloat16>(params, channel.world_size, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace b12x::comm
