// The exchanges of decode context parallelism on the host, for all ranks of a group at once.
#ifndef JAX_B12X_FFI_HOST_DCP_H_
#define JAX_B12X_FFI_HOST_DCP_H_

#include <cstdint>
#include <vector>

#include "cuda/comm/dcp_layout.h"
#include "ffi/host/float_types.h"

namespace b12x::host {

// The buffers of one rank in `DcpCombine`.
struct CombineBuffers {
  const void* partial = nullptr;  // [outer, world_size, inner, head_dim]
  const float* lse = nullptr;     // [outer, world_size, inner]
  void* out = nullptr;            // [outer, inner, head_dim]
  float* out_lse = nullptr;       // [outer, inner], or null
};

// out = sum over ranks, in rank order, of softmax(lse) * partial, in fp32, rounded once. A row
// whose LSE is not finite counts as nothing; where all are such, the result is 0 and its LSE -inf.
void DcpCombine(FloatType type, const comm::HeadRows& rows, int64_t head_dim, bool base_two,
                const std::vector<CombineBuffers>& ranks);

// The buffers of one rank in `DcpGather`.
struct GatherBuffers {
  const void* part = nullptr;  // [outer, row_bytes]
  void* whole = nullptr;       // [outer, world_size, row_bytes]
};

void DcpGather(int64_t outer, int64_t row_bytes, const std::vector<GatherBuffers>& ranks);

// Bytes that are NaN in every dtype that a gather takes.
void FillNanBytes(int64_t bytes, void* data);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_DCP_H_
