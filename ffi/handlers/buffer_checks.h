// Checks of a buffer's dtype and shape, with errors that name the op, the argument, what it was and
// what it must be.
#ifndef JAX_B12X_FFI_HANDLERS_BUFFER_CHECKS_H_
#define JAX_B12X_FFI_HANDLERS_BUFFER_CHECKS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

inline std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Checks one buffer of the op called `op`.
inline xla::ffi::Error CheckBuffer(std::string_view op, std::string_view name,
                                   const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                                   const std::vector<int64_t>& shape) {
  if (buffer.element_type() != dtype) {
    return xla::ffi::Error::InvalidArgument(
        std::string(op) + ": " + std::string(name) + " has XLA element type " +
        std::to_string(static_cast<int>(buffer.element_type())) + "; it must be " +
        std::to_string(static_cast<int>(dtype)));
  }
  const std::vector<int64_t> actual(buffer.dimensions().begin(), buffer.dimensions().end());
  if (actual != shape) {
    return xla::ffi::Error::InvalidArgument(std::string(op) + ": " + std::string(name) +
                                            " has shape " + ShapeText(actual) + "; it must be " +
                                            ShapeText(shape));
  }
  return xla::ffi::Error::Success();
}

// Checks an operand that may be absent, which a scalar says; `data` is null then.
template <typename T>
xla::ffi::Error ReadOptional(std::string_view op, std::string_view name,
                             const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType dtype,
                             const std::vector<int64_t>& shape, const T** data) {
  *data = nullptr;
  if (buffer.dimensions().size() == 0) return xla::ffi::Error::Success();
  *data = static_cast<const T*>(buffer.untyped_data());
  return CheckBuffer(op, name, buffer, dtype, shape);
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_BUFFER_CHECKS_H_
