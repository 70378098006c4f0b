// Where rows of heads are: in a whole tensor, and in the slot that a channel has for a peer. Plain
// arithmetic for kernels and handlers, 64 bits wide: a batch may have more than 2^31 elements.
#ifndef JAX_B12X_CUDA_COMM_DCP_LAYOUT_H_
#define JAX_B12X_CUDA_COMM_DCP_LAYOUT_H_

#include <cstdint>

#include "cuda/comm/channel.h"

#ifdef __CUDACC__
#define B12X_HOST_DEVICE __host__ __device__
#else
#define B12X_HOST_DEVICE
#endif

namespace b12x::comm {

// Heads of all ranks lie as [outer, world_size, inner] rows, heads of one rank as [outer, inner].
// [batch, heads] has outer = batch and inner = heads / world_size; [heads, batch] has outer = 1 and
// inner = heads / world_size * batch, so that neither needs a transpose.
struct HeadRows {
  int64_t outer = 0;
  int64_t inner = 0;
  int32_t world_size = 0;

  // The rows of one rank's heads.
  B12X_HOST_DEVICE int64_t count() const { return outer * inner; }

  // The row of the whole that row `row` of `rank`'s heads is.
  B12X_HOST_DEVICE int64_t InWhole(int64_t row, int rank) const {
    const int64_t of_outer = outer == 1 ? 0 : row / inner;
    return (of_outer * world_size + rank) * inner + (row - of_outer * inner);
  }
};

// A combine takes a row (one token's head) in parts of up to 512 bytes, one warp each. In a slot
// each part has a packet of which the first word is the row's LSE, so that nobody waits for another
// warp; behind all of these packets, at a new line, come the rows.
inline constexpr int64_t kLsePacketBytes = 16;
inline constexpr int64_t kPartBytes = 32 * 16;

B12X_HOST_DEVICE constexpr int64_t CombineParts(int64_t head_dim, int64_t element_bytes) {
  return (head_dim * element_bytes + kPartBytes - 1) / kPartBytes;
}

// Where the rows begin, for so many parts of all rows.
B12X_HOST_DEVICE constexpr int64_t CombineRowsOffset(int64_t parts) {
  return (parts * kLsePacketBytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// What a combine puts into one slot.
inline int64_t CombineSlotBytes(const HeadRows& rows, int64_t head_dim, int64_t element_bytes) {
  return CombineRowsOffset(rows.count() * CombineParts(head_dim, element_bytes)) +
         rows.count() * head_dim * element_bytes;
}

// What a gather puts into one slot for a tensor of so many bytes: each begins at a packet.
B12X_HOST_DEVICE constexpr int64_t GatherSlotBytes(int64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace b12x::comm

#undef B12X_HOST_DEVICE

#endif  // JAX_B12X_CUDA_COMM_DCP_LAYOUT_H_
