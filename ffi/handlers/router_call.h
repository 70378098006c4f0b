// `b12x_router`'s operands and attributes, as `jax_b12x/moe/routing.py` passes them, for both
// platforms.
#ifndef JAX_B12X_FFI_HANDLERS_ROUTER_CALL_H_
#define JAX_B12X_FFI_HANDLERS_ROUTER_CALL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/handlers/buffer_checks.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// Everything of a call but what only one platform has.
struct RouterBuffers {
  xla::ffi::AnyBuffer x, weight;
  xla::ffi::AnyBuffer bias;        // a scalar if there is none
  xla::ffi::AnyBuffer token_mask;  // likewise
  xla::ffi::Result<xla::ffi::AnyBuffer> topk_ids, topk_weights, logits;
};

struct RouterAttributes {
  std::string_view scoring;
  bool renormalize;
  float scale;
  int64_t num_groups;
  int64_t topk_groups;
  int64_t num_joined;
};

// Binds the arguments of a handler, after those of the platform, which `binding` has.
template <typename Binding>
auto BindRouter(Binding binding) {
  using xla::ffi::AnyBuffer;
  return std::move(binding)
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Arg<AnyBuffer>()
      .template Ret<AnyBuffer>()
      .template Ret<AnyBuffer>()
      .template Ret<AnyBuffer>()
      .template Ret<xla::ffi::Buffer<xla::ffi::U8>>()
      .template Attr<std::string_view>("scoring")
      .template Attr<bool>("renormalize")
      .template Attr<float>("scale")
      .template Attr<int64_t>("num_groups")
      .template Attr<int64_t>("topk_groups")
      .template Attr<int64_t>("num_joined");
}

template <typename Dtype>
xla::ffi::Error ReadRouterDtype(const char* name, xla::ffi::DataType from, Dtype* to) {
  switch (from) {
    case xla::ffi::DataType::F32:
      *to = Dtype::kF32;
      return xla::ffi::Error::Success();
    case xla::ffi::DataType::BF16:
      *to = Dtype::kBf16;
      return xla::ffi::Error::Success();
    case xla::ffi::DataType::F16:
      *to = Dtype::kF16;
      return xla::ffi::Error::Success();
    default:
      return xla::ffi::Error::InvalidArgument("b12x_router: " + std::string(name) +
                                              " must be float32, bfloat16 or float16");
  }
}

// Checks a call and fills in `call`: a RouterParams or a host::RouterProblem.
template <typename Call>
xla::ffi::Error ReadRouterCall(RouterBuffers& buffers, const RouterAttributes& attributes,
                               Call* call) {
  using xla::ffi::DataType;
  using xla::ffi::Error;
  const auto refuse = [](const std::string& message) {
    return Error::InvalidArgument("b12x_router: " + message);
  };
  const auto x_shape = buffers.x.dimensions();
  const auto weight_shape = buffers.weight.dimensions();
  const auto ids_shape = buffers.topk_ids->dimensions();
  if (x_shape.size() != 2 || weight_shape.size() != 2 || ids_shape.size() != 2) {
    return refuse("x, weight and topk_ids must have two axes");
  }
  const int64_t tokens = x_shape[0], hidden = x_shape[1], experts = weight_shape[0];
  const int64_t joined = attributes.num_joined, top_k = ids_shape[1] - joined;
  constexpr int64_t kMaxExperts = 1024, kMaxTopK = 16, kMaxGroups = 32, kMaxSize = 1 << 20;
  if (hidden < 16 || hidden % 16 != 0 || hidden > kMaxSize || tokens > kMaxSize) {
    return refuse("hidden must be a multiple of 16, and num_tokens and hidden at most 2^20");
  }
  if (experts < 1 || experts > kMaxExperts) return refuse("num_experts must be within [1, 1024]");
  if (top_k < 1 || top_k > kMaxTopK || top_k > experts) {
    return refuse("top_k must be within [1, min(16, num_experts)]");
  }
  if (joined < 0 || top_k + joined > kMaxTopK || experts + joined > kMaxExperts) {
    return refuse("num_joined must be 0 or more, with top_k at most 16, with num_experts 1024");
  }
  const int64_t groups = attributes.num_groups, topk_groups = attributes.topk_groups;
  if (groups < 1 || groups > kMaxGroups || experts % groups != 0 || topk_groups < 1 ||
      topk_groups > groups || top_k > topk_groups * (experts / groups)) {
    return refuse(
        "num_groups must be at most 32 and divide num_experts, and topk_groups of them hold top_k "
        "experts");
  }
  if (attributes.scoring == "softmax") {
    call->scoring = decltype(call->scoring)::kSoftmax;
  } else if (attributes.scoring == "sigmoid") {
    call->scoring = decltype(call->scoring)::kSigmoid;
  } else {
    return refuse("scoring is " + std::string(attributes.scoring) +
                  "; it must be softmax or sigmoid");
  }
  Error error = ReadRouterDtype("x", buffers.x.element_type(), &call->x_dtype);
  if (error.success()) {
    error = ReadRouterDtype("weight", buffers.weight.element_type(), &call->weight_dtype);
  }
  const auto check = [&](const char* name, const xla::ffi::AnyBuffer& buffer, DataType dtype,
                         const std::vector<int64_t>& shape) {
    if (error.success()) error = CheckBuffer("b12x_router", name, buffer, dtype, shape);
  };
  check("weight", buffers.weight, buffers.weight.element_type(), {experts, hidden});
  check("topk_ids", *buffers.topk_ids, DataType::S32, {tokens, top_k + joined});
  check("topk_weights", *buffers.topk_weights, DataType::F32, {tokens, top_k + joined});
  check("logits", *buffers.logits, DataType::F32, {tokens, experts});
  if (error.success()) {
    error =
        ReadOptional("b12x_router", "bias", buffers.bias, DataType::F32, {experts}, &call->bias);
  }
  if (error.success()) {
    error = ReadOptional("b12x_router", "token_mask", buffers.token_mask, DataType::PRED, {tokens},
                         &call->token_mask);
  }
  if (error.failure()) return error;

  call->x = buffers.x.untyped_data();
  call->weight = buffers.weight.untyped_data();
  call->topk_ids = static_cast<int32_t*>(buffers.topk_ids->untyped_data());
  call->topk_weights = static_cast<float*>(buffers.topk_weights->untyped_data());
  call->logits = static_cast<float*>(buffers.logits->untyped_data());
  call->num_tokens = static_cast<decltype(call->num_tokens)>(tokens);
  call->hidden = static_cast<decltype(call->hidden)>(hidden);
  call->num_experts = static_cast<decltype(call->num_experts)>(experts);
  call->top_k = static_cast<decltype(call->top_k)>(top_k);
  call->num_joined = static_cast<decltype(call->num_joined)>(joined);
  call->num_groups = static_cast<decltype(call->num_groups)>(groups);
  call->topk_groups = static_cast<decltype(call->topk_groups)>(topk_groups);
  call->renormalize = attributes.renormalize;
  call->scale = attributes.scale;
  return Error::Success();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_ROUTER_CALL_H_
