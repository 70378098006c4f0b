// The operands of the exchanges of decode context parallelism, decoded and checked: alike on every
// platform.
#ifndef JAX_B12X_FFI_HANDLERS_DCP_OPERANDS_H_
#define JAX_B12X_FFI_HANDLERS_DCP_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/comm/dcp_layout.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// `b12x_dcp_combine`: partial_out, lse, [token] -> out, [lse], [token]. Attributes: heads_axis,
// base_two, return_lse (int64).
struct CombineOperands {
  xla::ffi::DataType type = xla::ffi::DataType::INVALID;
  const void* partial = nullptr;
  const float* lse = nullptr;
  void* out = nullptr;
  float* out_lse = nullptr;  // null where it is not asked for
  comm::HeadRows rows;
  int64_t head_dim = 0;
  int64_t element_bytes = 0;
  bool base_two = false;
  int64_t message_bytes = 0;  // what it needs of a slot
  size_t num_args = 2;        // without the token
  size_t num_rets = 1;

  int64_t out_elements() const { return rows.count() * head_dim; }
};

xla::ffi::ErrorOr<CombineOperands> DecodeCombine(const xla::ffi::RemainingArgs& args,
                                                 const xla::ffi::RemainingRets& rets,
                                                 const xla::ffi::Dictionary& attrs, int world_size);

// `b12x_dcp_gather`: a, [b], [token] -> the same, gathered. Attributes: heads_axis, and
// second_axis, which is -1 without b (int64).
struct GatherOperands {
  struct Tensor {
    const void* part = nullptr;
    void* whole = nullptr;
    int64_t outer = 0;      // rows
    int64_t row_bytes = 0;  // of one rank

    int64_t part_bytes() const { return outer * row_bytes; }
  };
  std::vector<Tensor> tensors;  // one or two
  int64_t message_bytes = 0;
};

xla::ffi::ErrorOr<GatherOperands> DecodeGather(const xla::ffi::RemainingArgs& args,
                                               const xla::ffi::RemainingRets& rets,
                                               const xla::ffi::Dictionary& attrs, int world_size);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_DCP_OPERANDS_H_
