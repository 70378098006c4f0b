// Every rank pushes each head's partial attention and its LSE to the rank that the head belongs to,
// and combines what it is sent, in one launch: a warp takes a part of a row (one token's head), a
// lane a packet. The warp with the same index on every rank pushes a part and awaits it; no block
// waits for another of its own grid.
#include <algorithm>

#include "cuda/comm/packet.cuh"
#include "cuda/kernels/dcp.h"

namespace b12x::comm {
namespace {

constexpr int kWarp = 32;
static_assert(kWarp * kPacketBytes == kPartBytes);
constexpr int kMaxWarps = 8;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct CombineParams {
  CombineArrays arrays;
  HeadRows rows;
  int32_t head_dim;
  int32_t parts;  // of a row
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

// How much a shard counts, beside the highest LSE; an empty one does not.
__device__ __forceinline__ float Share(float lse, float highest, bool base_two) {
  if (!isfinite(lse)) return 0.0f;
  return base_two ? exp2f(lse - highest) : expf(lse - highest);
}

struct Weights {
  float highest;  // -inf where all shards are empty
  float total;    // of the shares

  __device__ float CombinedLse(bool base_two) const {
    if (highest == -INFINITY) return highest;
    return highest + (base_two ? log2f(total) : logf(total));
  }
};

// Each lane has the LSE of the rank of its number, and gets that rank's weight. Sums in rank order.
__device__ __forceinline__ Weights Weigh(float lse, int lane, int world_size, bool base_two,
                                         float* weight) {
  const bool present = lane < world_size && isfinite(lse);
  const float highest = WarpMax(present ? lse : -INFINITY);
  *weight = 0.0f;
  if (highest == -INFINITY) return {highest, 0.0f};
  const float share = present ? Share(lse, highest, base_two) : 0.0f;
  float total = 0.0f;
  for (int rank = 0; rank < world_size; ++rank) total += __shfl_sync(kAllLanes, share, rank);
  *weight = share / total;
  return {highest, total};
}

// The same for two ranks, without asking other lanes.
__device__ __forceinline__ Weights WeighTwo(float lse0, float lse1, bool base_two, float* weight0,
                                            float* weight1) {
  const float highest = fmaxf(isfinite(lse0) ? lse0 : -INFINITY, isfinite(lse1) ? lse1 : -INFINITY);
  *weight0 = *weight1 = 0.0f;
  if (highest == -INFINITY) return {highest, 0.0f};
  const float share0 = Share(lse0, highest, base_two);
  const float share1 = Share(lse1, highest, base_two);
  const float total = share0 + share1;
  *weight0 = share0 / total;
  *weight1 = share1 / total;
  return {highest, total};
}

// Adds a shard; an empty one may hold NaN.
template <typename T>
__device__ __forceinline__ void Add(float lse, float weight, const Packet<T>& part, float* sum) {
  if (!isfinite(lse)) return;
#pragma unroll
  for (int i = 0; i < Packet<T>::kElements; ++i) sum[i] += weight * Widen(part.elements[i]);
}

// kWorldSize: 0 reads it at run time.
template <typename T, int kWorldSize, bool kOrdered>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kBlocksOnSm)
    DcpCombineKernel(const __grid_constant__ CombineParams params) {
  static_assert(kMaxRanks <= kWarp);
  constexpr int kElements = Packet<T>::kElements;

  const ChannelView& view = ViewOf<kOrdered>(params);
  const int world_size = kWorldSize > 0 ? kWorldSize : view.world_size;
  const CombineArrays& arrays = params.arrays;
  const HeadRows& rows = params.rows;
  const T* partial = static_cast<const T*>(arrays.partial);
  T* out = static_cast<T*>(arrays.out);
  const int head_dim = params.head_dim;
  const int packets = head_dim / kElements;
  const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(T));
  const bool aligned = ((reinterpret_cast<uintptr_t>(partial) | reinterpret_cast<uintptr_t>(out)) %
                        kPacketBytes) == 0;
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * warps;
  const int64_t units = rows.count() * params.parts;
  const int64_t rows_offset = CombineRowsOffset(units);

  // A unit of work: a part of a row. Offsets are in a slot.
  struct Unit {
    int64_t row;
    int packet;  // this lane's, in the row
    int64_t lse_offset;
    int64_t packet_offset;
  };
  const auto unit_of = [&](int64_t index) {
    const int64_t row = params.parts == 1 ? index : index / params.parts;
    const int packet = static_cast<int>(index - row * params.parts) * kWarp + lane;
    return Unit{row, packet, index * kLsePacketBytes,
                rows_offset + row * row_bytes + packet * kPacketBytes};
  };
  const auto load = [&](int64_t in_whole, int packet) {
    Packet<T> loaded;
    if (packet < packets) {
      loaded = LoadPacket(partial + in_whole * head_dim + packet * kElements, kElements, aligned);
    }
    return loaded;
  };

  bool poisoned;
  const uint32_t epoch = BeginEpoch(view, &poisoned);
  for (int64_t index = first; index < units; index += stride) {
    const Unit unit = unit_of(index);
    // Ranks begin with different peers, so that not all send to the same one at a time.
    for (int step = 1; step < world_size; ++step) {
      int peer = view.rank + step;
      if (peer >= world_size) peer -= world_size;
      const int64_t in_whole = rows.InWhole(unit.row, peer);
      // Both loads are on their way before the first store.
      const uint32_t lse = NotEmpty(__float_as_uint(arrays.lse[in_whole]));
      const Packet<T> mine = Sendable(load(in_whole, unit.packet));
      if (poisoned) continue;
      unsigned char* slot =
          view.slabs[peer] + SlotOffset(view.slot_bytes, world_size, epoch, peer, view.rank);
      if (lane == 0) StoreVolatile(slot + unit.lse_offset, make_uint4(lse, 0, 0, 0));
      if (unit.packet < packets) {
        StoreVolatile(slot + unit.packet_offset, *reinterpret_cast<const uint4*>(&mine));
      }
    }
  }
  __syncthreads();  // all threads have the epoch
  EndEpoch(view, epoch);

  for (int64_t index = first; index < units; index += stride) {
    const Unit unit = unit_of(index);
    const bool active = unit.packet < packets;
    const int64_t in_whole = rows.InWhole(unit.row, view.rank);
    const float own_lse = arrays.lse[in_whole];
    const Packet<T> own = load(in_whole, unit.packet);
    const auto slot_of = [&](int source) {
      return view.slabs[view.rank] +
             SlotOffset(view.slot_bytes, world_size, epoch, view.rank, source);
    };

    float sum[kElements] = {};
    Weights weights;
    bool have_lses = !poisoned;
    bool complete = !poisoned;
    if constexpr (kWorldSize == 2) {
      const int other = 1 - view.rank;
      unsigned char* lse_at = slot_of(other) + unit.lse_offset;
      // Lanes without a packet look at the LSE twice.
      unsigned char* at = active ? slot_of(other) + unit.packet_offset : lse_at;
      uint4 header = make_uint4(0, 0, 0, 0);
      Packet<T> theirs = own;
      if (!poisoned) {
        have_lses = AwaitPackets(view, lse_at, at, other, &header,
                                 reinterpret_cast<uint4*>(&theirs), &complete);
        __syncwarp();  // all lanes have the LSE
        if (have_lses && lane == 0) StoreVolatile(lse_at, EmptyPacket());
        if (complete && active) StoreVolatile(at, EmptyPacket());
      }
      const float their_lse = __uint_as_float(header.x);
      const bool swap = view.rank != 0;
      const float lse0 = swap ? their_lse : own_lse;
      const float lse1 = swap ? own_lse : their_lse;
      float weight0, weight1;
      weights = WeighTwo(lse0, lse1, params.base_two, &weight0, &weight1);
      Add(lse0, weight0, Either(swap, theirs, own), sum);
      Add(lse1, weight1, Either(swap, own, theirs), sum);
    } else {
      float lse = own_lse;
      if (lane < world_size && lane != view.rank && !poisoned) {
        uint4 words;
        have_lses = TakePacket(view, slot_of(lane) + unit.lse_offset, lane, &words);
        lse = __uint_as_float(words.x);
      }
      have_lses = __all_sync(kAllLanes, have_lses);
      complete = have_lses;
      float weight;
      weights = Weigh(lse, lane, world_size, params.base_two, &weight);
      for (int source = 0; source < world_size; ++source) {
        const float source_lse = __shfl_sync(kAllLanes, lse, source);
        const float source_weight = __shfl_sync(kAllLanes, weight, source);
        Packet<T> part = own;
        if (source != view.rank && active && complete) {
          complete = TakePacket(view, slot_of(source) + unit.packet_offset, source,
                                reinterpret_cast<uint4*>(&part));
        }
        __syncwarp();
        Add(source_lse, source_weight, part, sum);
      }
    }

    if (active) {
      Packet<T> result;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        result.elements[i] = Round<T>(complete ? sum[i] : __uint_as_float(kOtherNan));
      }
      StorePacket(out + unit.row * head_dim + unit.packet * kElements, result, kElements, aligned);
    }
    if (unit.packet == 0 && arrays.out_lse != nullptr) {
      arrays.out_lse[unit.row] =
          have_lses ? weights.CombinedLse(params.base_two) : __uint_as_float(kOtherNan);
    }
  }
}

template <typename T>
void Launch(const CombineParams& params, int world_size, cudaStream_t stream) {
  // One warp a block while there is little to do, so that it is spread over the multiprocessors.
  const int64_t units = params.rows.count() * params.parts;
  const int warps = units <= 256 ? 1 : units <= 4 * kMaxBlocks ? 4 : kMaxWarps;
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>((units + warps - 1) / warps, kMaxBlocks));
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
  const auto parts = static_cast<int32_t>(CombineParts(head_dim, ByteWidth(type)));
  const CombineParams params{
      arrays, rows, static_cast<int32_t>(head_dim), parts, base_two, channel.token, channel.view};
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
