// The operands of `b12x_moe` in the order in which `jax_b12x/moe/op.py` passes them.
#ifndef JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_
#define JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_

#include <cstddef>
#include <cstdint>
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

// Checks one buffer; the error names it, what it was and what it must be.
inline xla::ffi::Error CheckBuffer(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                                   xla::ffi::DataType dtype, const std::vector<int64_t>& shape) {
  return CheckBuffer("b12x_moe", name, buffer, dtype, shape);
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_
