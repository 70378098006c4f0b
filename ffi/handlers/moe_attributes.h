// The attributes of `b12x_moe`, as `jax_b12x/moe/op.py` writes them.
#ifndef JAX_B12X_FFI_HANDLERS_MOE_ATTRIBUTES_H_
#define JAX_B12X_FFI_HANDLERS_MOE_ATTRIBUTES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

struct MoeAttributes {
  std::string_view recipe;
  std::string_view weight_format;
  std::string_view implementation;
  std::string_view layout;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  std::string_view activation;
  float alpha = 0;
  float limit = 0;
  std::string_view host_isa;
  xla::ffi::Dictionary geometry{nullptr};
};

// Reads one attribute; the error says which one is missing or of another type.
template <typename T>
xla::ffi::Error ReadAttribute(const xla::ffi::Dictionary& attributes, std::string_view name,
                              T* value) {
  xla::ffi::ErrorOr<T> read = attributes.get<T>(name);
  if (read.has_error()) {
    return xla::ffi::Error::InvalidArgument("b12x_moe: attribute " + std::string(name) + ": " +
                                            read.error().message());
  }
  *value = *read;
  return xla::ffi::Error::Success();
}

inline xla::ffi::Error ReadMoeAttributes(const xla::ffi::Dictionary& from, MoeAttributes* to) {
  for (const auto& [name, value] :
       {std::pair{"recipe", &to->recipe}, std::pair{"weight_format", &to->weight_format},
        std::pair{"implementation", &to->implementation}, std::pair{"layout", &to->layout},
        std::pair{"activation", &to->activation}, std::pair{"host_isa", &to->host_isa}}) {
    if (xla::ffi::Error error = ReadAttribute(from, name, value); error.failure()) return error;
  }
  for (const auto& [name, value] :
       {std::pair{"hidden", &to->hidden}, std::pair{"intermediate", &to->intermediate}}) {
    if (xla::ffi::Error error = ReadAttribute(from, name, value); error.failure()) return error;
  }
  for (const auto& [name, value] :
       {std::pair{"alpha", &to->alpha}, std::pair{"limit", &to->limit}}) {
    if (xla::ffi::Error error = ReadAttribute(from, name, value); error.failure()) return error;
  }
  return ReadAttribute(from, "geometry", &to->geometry);
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_MOE_ATTRIBUTES_H_
