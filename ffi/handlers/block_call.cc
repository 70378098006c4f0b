#include "ffi/handlers/block_call.h"

#include <string>

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;
using xffi::AnyBuffer;
using xffi::Error;

constexpr size_t kNumWeights = kNumMoeOperands - kW13;

// Takes a call's buffers one after another; the counts were checked.
struct Buffers {
  xffi::RemainingArgs args;
  xffi::RemainingRets rets;
  size_t next_arg = 0;
  size_t next_ret = 0;

  AnyBuffer Arg() { return *args.get<AnyBuffer>(next_arg++); }
  xffi::Result<AnyBuffer> Ret() { return *rets.get<AnyBuffer>(next_ret++); }
};

MoeBuffers ReadMoe(Buffers& buffers, const AnyBuffer& x, const AnyBuffer& ids,
                   const AnyBuffer& weights) {
  MoeBuffers moe;
  moe.operands = {x, ids, weights};
  for (size_t i = 0; i < kNumWeights; ++i) moe.operands.push_back(buffers.Arg());
  return moe;
}

// Reads one attribute; the error says which one is missing or of another type.
template <typename T>
Error Read(const xffi::Dictionary& attributes, std::string_view name, T* value) {
  xffi::ErrorOr<T> read = attributes.get<T>(name);
  if (read.has_error()) {
    return Error::InvalidArgument("b12x_moe_block: attribute " + std::string(name) + ": " +
                                  read.error().message());
  }
  *value = *read;
  return Error::Success();
}

Error ReadRouterAttributes(const xffi::Dictionary& from, RouterAttributes* to) {
  Error error = Read(from, "scoring", &to->scoring);
  if (error.success()) error = Read(from, "renormalize", &to->renormalize);
  if (error.success()) error = Read(from, "scale", &to->scale);
  if (error.success()) error = Read(from, "num_groups", &to->num_groups);
  if (error.success()) error = Read(from, "topk_groups", &to->topk_groups);
  if (error.success()) error = Read(from, "num_joined", &to->num_joined);
  return error;
}

}  // namespace

Error ReadBlockCall(xffi::RemainingArgs args, xffi::RemainingRets rets, xffi::Dictionary attributes,
                    BlockCall* call) {
  std::string_view order, shared;
  bool router = false;
  Error error = Read(attributes, "order", &order);
  if (error.success()) error = ReadBlockOrder(order, &call->program.order);
  if (error.success()) error = Read(attributes, "has_router", &router);
  if (error.success()) error = Read(attributes, "shared_kind", &shared);
  if (error.success()) error = Read(attributes, "routed", &call->routed_attributes);
  if (error.failure()) return error;
  const bool packed = shared == "packed", dense = shared == "dense";
  if (!packed && !dense && shared != "none") {
    return Error::InvalidArgument("b12x_moe_block: shared_kind is " + std::string(shared) +
                                  "; it must be none, packed or dense");
  }
  if (call->program.order == BlockOrder::kJoined && shared != "none") {
    return Error::InvalidArgument("b12x_moe_block: order is joined, but shared_kind is " +
                                  std::string(shared) + "; it must be none");
  }
  call->program.router = router;
  call->program.shared = packed || dense;
  const size_t num_args = 1 + (router ? 3 : 2) + kNumWeights +
                          (packed  ? 2 + kNumWeights
                           : dense ? 5
                                   : 0);
  const size_t num_rets = 1 + (router ? 4 : 0) + 1 + (call->program.shared ? 3 : 0);
  if (args.size() != num_args || rets.size() != num_rets) {
    return Error::InvalidArgument("b12x_moe_block: it takes " + std::to_string(num_args) +
                                  " operands and gives " + std::to_string(num_rets) + " results");
  }

  Buffers buffers{args, rets};
  const AnyBuffer x = buffers.Arg();
  call->out = *buffers.Ret();
  if (router) {
    xffi::Dictionary router_attributes{nullptr};
    error = Read(attributes, "router", &router_attributes);
    if (error.success()) error = ReadRouterAttributes(router_attributes, &call->router_attributes);
    if (error.failure()) return error;
    const AnyBuffer weight = buffers.Arg(), bias = buffers.Arg(), mask = buffers.Arg();
    auto ids = buffers.Ret(), weights = buffers.Ret(), logits = buffers.Ret();
    call->router.emplace(RouterBuffers{x, weight, bias, mask, ids, weights, logits});
    call->router_scratch = *buffers.Ret();
    call->routed = ReadMoe(buffers, x, *ids, *weights);
  } else {
    const AnyBuffer ids = buffers.Arg(), weights = buffers.Arg();
    call->routed = ReadMoe(buffers, x, ids, weights);
  }
  call->routed.scratch = *buffers.Ret();
  call->routed.out = call->out;
  if (!call->program.shared) return Error::Success();

  // The two results are summed at the end.
  call->routed.out = *buffers.Ret();
  auto shared_out = buffers.Ret();
  auto shared_scratch = buffers.Ret();
  call->shared_out = *shared_out;
  error = Read(attributes, "shared", &call->shared_attributes);
  if (error.failure()) return error;
  if (packed) {
    const AnyBuffer ids = buffers.Arg(), weights = buffers.Arg();
    call->shared_experts = ReadMoe(buffers, x, ids, weights);
    call->shared_experts->out = *shared_out;
    call->shared_experts->scratch = *shared_scratch;
    return error;
  }
  const AnyBuffer w13 = buffers.Arg(), w2 = buffers.Arg(), w13_bias = buffers.Arg();
  const AnyBuffer w2_bias = buffers.Arg(), gate = buffers.Arg();
  call->dense.emplace(DenseMlpBuffers{x, w13, w2, w13_bias, w2_bias, gate, shared_out});
  call->dense_scratch = *shared_scratch;
  error = Read(call->shared_attributes, "activation", &call->dense_activation);
  if (error.success()) error = Read(call->shared_attributes, "alpha", &call->dense_alpha);
  if (error.success()) error = Read(call->shared_attributes, "limit", &call->dense_limit);
  return error;
}

}  // namespace b12x::ffi
