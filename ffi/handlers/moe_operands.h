// The operands of `b12x_moe` in the order in which `jax_b12x/moe/op.py` passes them.
#ifndef JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_
#define JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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

inline std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Checks one buffer; the error names it, what it was and what it must be.
inline xla::ffi::Error CheckBuffer(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                                   xla::ffi::DataType dtype, const std::vector<int64_t>& shape) {
  if (buffer.element_type() != dtype) {
    return xla::ffi::Error::InvalidArgument(
        "b12x_moe: " + std::string(name) + " has XLA element type " +
        std::to_string(static_cast<int>(buffer.element_type())) + "; it must be " +
        std::to_string(static_cast<int>(dtype)));
  }
  const std::vector<int64_t> actual(buffer.dimensions().begin(), buffer.dimensions().end());
  if (actual != shape) {
    return xla::ffi::Error::InvalidArgument("b12x_moe: " + std::string(name) + " has shape " +
                                            ShapeText(actual) + "; it must be " + ShapeText(shape));
  }
  return xla::ffi::Error::Success();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_MOE_OPERANDS_H_
