// Sixteen bytes of a message: loading, pushing, waiting, adding.
#ifndef JAX_B12X_CUDA_COMM_PACKET_CUH_
#define JAX_B12X_CUDA_COMM_PACKET_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/comm/channel.h"

namespace b12x::comm {

// So many blocks of 256 threads fit on a multiprocessor at the least: 64 registers a thread.
// Without a figure the compiler spills to make more of them fit.
inline constexpr int kBlocksOnSm = 4;
// Waits look at the clock every so many loads; a load of a word that is on its way takes under 1
// us.
inline constexpr int kSpinsPerLook = 64;
// A wait right after one that timed out is for the same lost rank, most likely, in the next call of
// the same program: that a program of many calls ends soon, it gets a short grace only.
inline constexpr unsigned long long kSameRunNs = 10'000'000;
inline constexpr unsigned long long kGraceNs = 5'000'000;

__device__ __forceinline__ float Widen(float value) { return value; }
__device__ __forceinline__ float Widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float Widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T Round(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

template <typename T>
struct alignas(kPacketBytes) Packet {
  static constexpr int kElements = kPacketBytes / sizeof(T);
  T elements[kElements];
};

// Word by word, so that both stay in registers.
template <typename T>
__device__ __forceinline__ Packet<T> Either(bool first, const Packet<T>& a, const Packet<T>& b) {
  const uint4& x = *reinterpret_cast<const uint4*>(&a);
  const uint4& y = *reinterpret_cast<const uint4*>(&b);
  Packet<T> chosen;
  *reinterpret_cast<uint4*>(&chosen) =
      make_uint4(first ? x.x : y.x, first ? x.y : y.y, first ? x.z : y.z, first ? x.w : y.w);
  return chosen;
}

// The first `valid` elements at `data`, zeros behind them.
template <typename T>
__device__ __forceinline__ Packet<T> LoadPacket(const T* data, int valid, bool aligned) {
  Packet<T> packet;
  if (aligned && valid >= Packet<T>::kElements) {
    *reinterpret_cast<uint4*>(&packet) = *reinterpret_cast<const uint4*>(data);
  } else {
#pragma unroll
    for (int i = 0; i < Packet<T>::kElements; ++i) {
      packet.elements[i] = i < valid ? data[i] : Round<T>(0.0f);
    }
  }
  return packet;
}

template <typename T>
__device__ __forceinline__ void StorePacket(T* data, const Packet<T>& packet, int valid,
                                            bool aligned) {
  if (aligned && valid >= Packet<T>::kElements) {
    *reinterpret_cast<uint4*>(data) = *reinterpret_cast<const uint4*>(&packet);
  } else {
#pragma unroll
    for (int i = 0; i < Packet<T>::kElements; ++i) {
      if (i < valid) data[i] = packet.elements[i];
    }
  }
}

// Words are valid one by one, so that it does not matter whether the sixteen bytes arrive at once.
__device__ __forceinline__ uint4 LoadVolatile(const void* at) {
  uint4 words;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at)
               : "memory");
  return words;
}

__device__ __forceinline__ void StoreVolatile(void* at, uint4 words) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

__device__ __forceinline__ bool Complete(uint4 words) {
  return words.x != kEmpty && words.y != kEmpty && words.z != kEmpty && words.w != kEmpty;
}

__device__ __forceinline__ uint4 EmptyPacket() {
  return make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
}

__device__ __forceinline__ uint32_t NotEmpty(uint32_t word) {
  return word == kEmpty ? kOtherNan : word;
}

// What is sent of a packet, and what its sender adds as well.
template <typename T>
__device__ __forceinline__ Packet<T> Sendable(Packet<T> packet) {
  uint4& words = *reinterpret_cast<uint4*>(&packet);
  words = make_uint4(NotEmpty(words.x), NotEmpty(words.y), NotEmpty(words.z), NotEmpty(words.w));
  return packet;
}

__device__ __forceinline__ unsigned long long GlobalTimer() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Out of line: it is for waits that last. By value, so that the caller's packet stays in registers.
// What it returns is not complete when the wait timed out.
static __device__ __noinline__ uint4 WaitLong(const ChannelView& view, const void* at, int source) {
  const unsigned long long begun = GlobalTimer();
  const unsigned long long stalled =
      *reinterpret_cast<volatile unsigned long long*>(view.stalled_at);
  const bool same_run = stalled != 0 && begun - stalled < kSameRunNs;
  const unsigned long long limit =
      same_run && view.timeout_ns > kGraceNs ? kGraceNs : view.timeout_ns;
  uint4 words;
  do {
    for (int spin = 0; spin < kSpinsPerLook; ++spin) {
      words = LoadVolatile(at);
      if (Complete(words)) {
        if (same_run) *reinterpret_cast<volatile unsigned long long*>(view.stalled_at) = 0;
        return words;
      }
    }
  } while (GlobalTimer() - begun < limit);
  *reinterpret_cast<volatile unsigned long long*>(view.stalled_at) = GlobalTimer();
  auto* header = reinterpret_cast<ChannelHeader*>(view.slabs[view.rank]);
  const uint32_t missing = atomicOr(&header->missing, 1u << source) | (1u << source);
  *reinterpret_cast<volatile uint32_t*>(&header->poisoned) = 1;
  *reinterpret_cast<volatile uint32_t*>(&view.status->missing) = missing;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&view.status->failed) = 1;
  return words;
}

// Waits for a packet in a slot of this rank's slab, and leaves it there; false when it did not come
// in time.
__device__ __forceinline__ bool AwaitPacket(const ChannelView& view, const void* at, int source,
                                            uint4* words) {
  for (int spin = 0; spin < kSpinsPerLook; ++spin) {
    *words = LoadVolatile(at);
    if (Complete(*words)) return true;
  }
  *words = WaitLong(view, at, source);
  return Complete(*words);
}

// The same for two packets of one source at once. Returns whether the first came; `both` says
// whether both did.
__device__ __forceinline__ bool AwaitPackets(const ChannelView& view, const void* first_at,
                                             const void* second_at, int source, uint4* first,
                                             uint4* second, bool* both) {
  bool done = false;
  for (int spin = 0; spin < kSpinsPerLook && !done; ++spin) {
    *first = LoadVolatile(first_at);
    *second = LoadVolatile(second_at);
    done = Complete(*first) && Complete(*second);
  }
  if (!Complete(*first)) *first = WaitLong(view, first_at, source);
  const bool have_first = Complete(*first);
  if (have_first && !Complete(*second)) *second = WaitLong(view, second_at, source);
  *both = have_first && Complete(*second);
  return have_first;
}

// Takes a packet out of a slot; false when it did not come in time.
__device__ __forceinline__ bool TakePacket(const ChannelView& view, unsigned char* at, int source,
                                           uint4* words) {
  if (!AwaitPacket(view, at, source, words)) return false;
  StoreVolatile(at, EmptyPacket());
  return true;
}

// Puts the packet at `offset` of a message into the slots of all other ranks.
__device__ __forceinline__ void PushPacket(const ChannelView& view, int world_size, uint32_t epoch,
                                           int64_t offset, uint4 words) {
  // Ranks begin with different peers, so that not all send to the same one at a time.
  for (int step = 1; step < world_size; ++step) {
    int peer = view.rank + step;
    if (peer >= world_size) peer -= world_size;
    StoreVolatile(
        view.slabs[peer] + SlotOffset(view.slot_bytes, world_size, epoch, peer, view.rank) + offset,
        words);
  }
}

// The sum over the ranks, in rank order, of the packet at `offset`; false when a rank did not
// arrive.
template <typename T>
__device__ __forceinline__ bool SumPacket(const ChannelView& view, int world_size, uint32_t epoch,
                                          int64_t offset, const Packet<T>& mine, float* sum) {
  bool arrived = true;
#pragma unroll 1
  for (int source = 0; source < world_size; ++source) {
    Packet<T> packet = mine;
    if (source != view.rank) {
      arrived &=
          TakePacket(view,
                     view.slabs[view.rank] +
                         SlotOffset(view.slot_bytes, world_size, epoch, view.rank, source) + offset,
                     source, reinterpret_cast<uint4*>(&packet));
      if (!arrived) break;
    }
#pragma unroll
    for (int i = 0; i < Packet<T>::kElements; ++i) {
      const float value = Widen(packet.elements[i]);
      sum[i] = source == 0 ? value : sum[i] + value;
    }
  }
  return arrived;
}

// The epoch of this launch. Every block calls `EndEpoch` when all its threads have called this.
__device__ __forceinline__ uint32_t BeginEpoch(const ChannelView& view, bool* poisoned) {
  const auto* header = reinterpret_cast<const ChannelHeader*>(view.slabs[view.rank]);
  *poisoned = header->poisoned != 0;
  return header->epoch[blockIdx.x];
}

// Advances the block's share of the epochs, its own included.
__device__ __forceinline__ void EndEpoch(const ChannelView& view, uint32_t epoch) {
  auto* header = reinterpret_cast<ChannelHeader*>(view.slabs[view.rank]);
  for (int word = blockIdx.x + threadIdx.x * gridDim.x; word < kMaxBlocks;
       word += blockDim.x * gridDim.x) {
    header->epoch[word] = epoch + 1;
  }
}

// Where a kernel finds its channel. An order token is the address of the channel's view on this
// device.
template <bool kOrdered, typename Params>
__device__ __forceinline__ const ChannelView& ViewOf(const Params& params) {
  if constexpr (kOrdered) {
    return **static_cast<const ChannelView* const*>(params.token);
  } else {
    return params.view;
  }
}

}  // namespace b12x::comm

#endif  // JAX_B12X_CUDA_COMM_PACKET_CUH_
