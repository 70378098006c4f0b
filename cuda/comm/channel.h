// A channel in device memory, as kernels see it: plain pointers, no ownership.
//
// Each rank has one slab: a header, then for each of two epochs and each other rank a slot into
// which that rank pushes its message. A word that has not arrived yet holds `kEmpty`; whoever reads
// a slot puts `kEmpty` back. That is all the synchronisation there is: the data is its own flag.
//
// Why two slots suffice: a rank pushes for epoch e + 2 after it has read all of epoch e + 1, which
// the reader pushed after its kernel of epoch e, in which it emptied the slot, had ended.
#ifndef JAX_B12X_CUDA_COMM_CHANNEL_H_
#define JAX_B12X_CUDA_COMM_CHANNEL_H_

#include <cstdint>

namespace b12x::comm {

inline constexpr int kMaxRanks = 16;
// The most blocks that a launch may have: each has its own copy of the epoch.
inline constexpr int kMaxBlocks = 512;
inline constexpr int kPacketBytes = 16;
// Writes cross the link in lines; slots begin with one.
inline constexpr int kLineBytes = 128;
inline constexpr int kHeaderBytes = 4096;
inline constexpr int kBuffers = 2;
// A NaN in every dtype. The sender turns it into another NaN where it is data.
inline constexpr uint32_t kEmpty = 0xFFFFFFFFu;
inline constexpr uint32_t kOtherNan = 0x7FFFFFFFu;

// In pinned host memory, one for each channel and rank: written once, when a call times out.
struct ChannelStatus {
  uint32_t failed;
  uint32_t missing;  // bit r: rank r had not arrived
};

// What a rank's kernel needs to know of its channel.
struct ChannelView {
  unsigned char* slabs[kMaxRanks];  // of each rank of the group
  ChannelStatus* status;            // this rank's
  // In device memory, one for each rank of the pool: when a wait last timed out, by the global
  // timer.
  unsigned long long* stalled_at;
  unsigned long long timeout_ns;
  int64_t slot_bytes;
  int32_t rank;
  int32_t world_size;
};

// The first bytes of a slab. All epochs are equal between launches: a block reads its own and
// advances those that are its share, so that no block waits for another.
struct ChannelHeader {
  uint32_t epoch[kMaxBlocks];
  uint32_t poisoned;
  uint32_t missing;
  // For calls that find their channel through an order token.
  ChannelView view;
};
static_assert(sizeof(ChannelHeader) <= kHeaderBytes);

enum class FloatType { kF32, kF16, kBF16 };

inline constexpr int64_t ByteWidth(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

// Where a call finds its channel: in `view`, or, when there is a token, in what the token points
// to.
struct ChannelRef {
  ChannelView view;
  const void* token = nullptr;
  int32_t world_size = 0;
};

// The slot of `source` in the slab of `reader`; a rank has none in its own.
inline constexpr int64_t SlotOffset(int64_t slot_bytes, int world_size, uint32_t epoch, int reader,
                                    int source) {
  const int index = source < reader ? source : source - 1;
  return kHeaderBytes +
         (static_cast<int64_t>(epoch % kBuffers) * (world_size - 1) + index) * slot_bytes;
}

}  // namespace b12x::comm

#endif  // JAX_B12X_CUDA_COMM_CHANNEL_H_
