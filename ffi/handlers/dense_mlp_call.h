// `b12x_dense_mlp`'s operands and attributes, as `jax_b12x/moe/dense.py` passes them, for both
// platforms.
#ifndef JAX_B12X_FFI_HANDLERS_DENSE_MLP_CALL_H_
#define JAX_B12X_FFI_HANDLERS_DENSE_MLP_CALL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/handlers/buffer_checks.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

struct DenseMlpBuffers {
  xla::ffi::AnyBuffer x, w13, w2;
  xla::ffi::AnyBuffer w13_bias, w2_bias, shared_gate;  // a scalar if there is none
  xla::ffi::Result<xla::ffi::AnyBuffer> out;
};

// Binds the arguments of a handler, after those of the platform, which `binding` has.
template <typename Binding>
auto BindDenseMlp(Binding binding) {
  using xla::ffi::AnyBuffer;
  return std::move(binding)
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Ret<AnyBuffer>()
      .template Ret<xla::ffi::Buffer<xla::ffi::U8>>()
      .template Attr<std::string_view>("activation")
      .template Attr<float>("alpha")
      .template Attr<float>("limit");
}

// Reads the name of an activation into an enum that has both.
template <typename Kind>
xla::ffi::Error ReadActivation(std::string_view name, Kind* kind) {
  if (name == "silu") {
    *kind = Kind::kSilu;
  } else if (name == "swiglu_oai") {
    *kind = Kind::kSwigluOai;
  } else {
    return xla::ffi::Error::InvalidArgument("b12x_dense_mlp: activation is " + std::string(name) +
                                            "; it must be silu or swiglu_oai");
  }
  return xla::ffi::Error::Success();
}

// Checks a call and fills in sizes and pointers of `call`: a DenseMlpParams or a
// host::DenseMlpProblem.
template <typename Call>
xla::ffi::Error ReadDenseMlpBuffers(DenseMlpBuffers& buffers, Call* call) {
  using xla::ffi::DataType;
  using xla::ffi::Error;
  constexpr const char* kOp = "b12x_dense_mlp";
  if (buffers.x.dimensions().size() != 2 || buffers.w2.dimensions().size() != 2) {
    return Error::InvalidArgument("b12x_dense_mlp: x and w2 must have two axes");
  }
  const int64_t tokens = buffers.x.dimensions()[0], hidden = buffers.x.dimensions()[1];
  const int64_t intermediate = buffers.w2.dimensions()[1];
  constexpr int64_t kMaxSize = 1 << 20;
  if (hidden < 16 || hidden % 16 != 0 || hidden > kMaxSize || intermediate < 16 ||
      intermediate % 16 != 0 || intermediate > kMaxSize || tokens > kMaxSize) {
    return Error::InvalidArgument(
        "b12x_dense_mlp: hidden and intermediate must be multiples of 16, and no size more than "
        "2^20");
  }
  const DataType dtype = buffers.x.element_type();
  Error error = Error::Success();
  const auto check = [&](const char* name, const xla::ffi::AnyBuffer& buffer,
                         const std::vector<int64_t>& shape) {
    if (error.success()) error = CheckBuffer(kOp, name, buffer, dtype, shape);
  };
  check("w13", buffers.w13, {2 * intermediate, hidden});
  check("w2", buffers.w2, {hidden, intermediate});
  check("out", *buffers.out, {tokens, hidden});
  if (error.success()) {
    error = ReadOptional(kOp, "w13_bias", buffers.w13_bias, DataType::F32, {2 * intermediate},
                         &call->w13_bias);
  }
  if (error.success()) {
    error = ReadOptional(kOp, "w2_bias", buffers.w2_bias, DataType::F32, {hidden}, &call->w2_bias);
  }
  if (error.success()) {
    error =
        ReadOptional(kOp, "shared_gate", buffers.shared_gate, dtype, {hidden}, &call->shared_gate);
  }
  if (error.failure()) return error;

  call->x = buffers.x.untyped_data();
  call->w13 = buffers.w13.untyped_data();
  call->w2 = buffers.w2.untyped_data();
  call->out = buffers.out->untyped_data();
  call->num_tokens = static_cast<decltype(call->num_tokens)>(tokens);
  call->hidden = static_cast<decltype(call->hidden)>(hidden);
  call->intermediate = static_cast<decltype(call->intermediate)>(intermediate);
  return Error::Success();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_DENSE_MLP_CALL_H_
