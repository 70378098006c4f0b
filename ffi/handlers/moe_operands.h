// The operands of `b12x_moe` in the order in which `jax_b12x/moe/op.py` passes them.
#ifndef JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_
#define JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ffi/handlers/buffer_checks.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

enum MoeOperand : size_t {
  kX,
  kTopkIds,
  kTopkWeights,
  kW13,
  kW13Scale,
  kW13GlobalScale,
  kW2,
  kW2Scale,
  kW2GlobalScale,
  kW13InputScale,
  kW2InputScale,
  kW13Bias,
  kW2Bias,
  kNumMoeOperands,
};

enum MoeResult : size_t { kOut, kScratch, kNumMoeResults };

// The buffers of one MoE, wherever they stand among those of a call.
struct MoeBuffers {
  std::vector<xla::ffi::AnyBuffer> operands;  // by MoeOperand
  std::optional<xla::ffi::AnyBuffer> out;
  std::optional<xla::ffi::AnyBuffer> scratch;
};

// Those of a call that is an MoE and nothing else.
inline xla::ffi::Error ReadMoeBuffers(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                                      MoeBuffers* buffers) {
  if (args.size() != kNumMoeOperands || rets.size() != kNumMoeResults) {
    return xla::ffi::Error::InvalidArgument("b12x_moe takes 13 operands and gives 2 results");
  }
  for (size_t i = 0; i < kNumMoeOperands; ++i) {
    buffers->operands.push_back(*args.get<xla::ffi::AnyBuffer>(i));
  }
  buffers->out = **rets.get<xla::ffi::AnyBuffer>(kOut);
  buffers->scratch = **rets.get<xla::ffi::AnyBuffer>(kScratch);
  return xla::ffi::Error::Success();
}

// Checks one buffer; the error names it, what it was and what it must be.
inline xla::ffi::Error CheckBuffer(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                                   xla::ffi::DataType dtype, const std::vector<int64_t>& shape) {
  return CheckBuffer("b12x_moe", name, buffer, dtype, shape);
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_
