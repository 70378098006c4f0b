// The all-reduces on the `cpu` platform: decodes operands, finds the channel and hands the buffers
// to the meeting place.
#include <utility>

#include "ffi/handlers/channel_call_cpu.h"
#include "ffi/handlers/families.h"
#include "ffi/host/all_reduce.h"
#include "ffi/runtime/meeting.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

// Opens an ordered program: the token names the channel that the program holds.
xffi::Error OpenOrder(ChannelCall* call, xffi::Result<xffi::AnyBuffer> token) {
  if (xffi::Error error = CheckToken(*token); error.failure()) return error;
  const runtime::Channel& channel = call->lease->channel();
  if (channel.refused()) return Refusal(channel);
  WriteToken(channel, token->untyped_data());
  return xffi::Error::Success();
}

xffi::Future AllReduce(ChannelCall* call, xffi::RunId run, int32_t device, xffi::RemainingArgs args,
                       xffi::RemainingRets rets, xffi::Dictionary) {
  try {
    const auto x = args.get<xffi::AnyBuffer>(0);
    auto out = rets.get<xffi::AnyBuffer>(0);
    if (!x || !out) return Failed(xffi::Error::InvalidArgument("b12x_all_reduce takes x"));
    const auto type = FloatTypeOf(x->element_type());
    if (type.has_error()) return Failed(type.error());
    const auto count = static_cast<int64_t>(x->element_count());
    if ((*out)->element_type() != x->element_type() ||
        static_cast<int64_t>((*out)->element_count()) != count) {
      return Failed(xffi::Error::InvalidArgument("b12x_all_reduce: the result must be like x"));
    }
    const auto channel = FindChannel(*call, args, rets, 1, 1);
    if (static_cast<int64_t>(x->size_bytes()) > channel->capacity()) {
      return Failed(xffi::Error::InvalidArgument("b12x_all_reduce: x is larger than its channel"));
    }
    runtime::Arrival arrival;
    arrival.inputs = {x->untyped_data()};
    arrival.outputs = {(*out)->untyped_data()};
    arrival.fill_nan = [type = *type, count, data = (*out)->untyped_data()] {
      host::FillNan(type, count, data);
    };
    return Meet(*call, channel, device, run, std::move(arrival),
                [type = *type, count](const std::vector<runtime::Arrival>& ranks) {
                  std::vector<const void*> inputs;
                  std::vector<void*> outputs;
                  for (const runtime::Arrival& rank : ranks) {
                    inputs.push_back(rank.inputs[0]);
                    outputs.push_back(rank.outputs[0]);
                  }
                  host::AllReduce(type, count, inputs, outputs);
                });
  } catch (const std::exception& error) {
    return Failed(ToError(error));
  }
}

xffi::Future AllReduceRmsNorm(ChannelCall* call, xffi::RunId run, int32_t device,
                              xffi::RemainingArgs args, xffi::RemainingRets rets,
                              xffi::Dictionary attrs) {
  try {
    const auto x = args.get<xffi::AnyBuffer>(0);
    const auto residual = args.get<xffi::AnyBuffer>(1);
    const auto weight = args.get<xffi::AnyBuffer>(2);
    auto normed = rets.get<xffi::AnyBuffer>(0);
    auto new_residual = rets.get<xffi::AnyBuffer>(1);
    const auto eps = attrs.get<float>("eps");
    if (!x || !residual || !weight || !normed || !new_residual || !eps) {
      return Failed(xffi::Error::InvalidArgument(
          "b12x_all_reduce_rms_norm takes x, residual and weight, and the attribute eps (float)"));
    }
    const auto type = FloatTypeOf(x->element_type());
    if (type.has_error()) return Failed(type.error());
    const auto count = static_cast<int64_t>(x->element_count());
    const auto hidden = static_cast<int64_t>(weight->element_count());
    for (const xffi::AnyBuffer& each : {*residual, **normed, **new_residual}) {
      if (each.element_type() != x->element_type() ||
          static_cast<int64_t>(each.element_count()) != count) {
        return Failed(xffi::Error::InvalidArgument(
            "b12x_all_reduce_rms_norm: residual and results must be like x"));
      }
    }
    if (weight->element_type() != x->element_type() || hidden == 0 || count % hidden != 0) {
      return Failed(xffi::Error::InvalidArgument(
          "b12x_all_reduce_rms_norm: weight must be [hidden] of x's dtype"));
    }
    const auto channel = FindChannel(*call, args, rets, 3, 2);
    if (static_cast<int64_t>(x->size_bytes()) > channel->capacity()) {
      return Failed(
          xffi::Error::InvalidArgument("b12x_all_reduce_rms_norm: x is larger than its channel"));
    }
    runtime::Arrival arrival;
    arrival.inputs = {x->untyped_data(), residual->untyped_data(), weight->untyped_data()};
    arrival.outputs = {(*normed)->untyped_data(), (*new_residual)->untyped_data()};
    arrival.fill_nan = [type = *type, count, outputs = arrival.outputs] {
      for (void* output : outputs) host::FillNan(type, count, output);
    };
    return Meet(
        *call, channel, device, run, std::move(arrival),
        [type = *type, count, hidden, eps = *eps](const std::vector<runtime::Arrival>& ranks) {
          std::vector<host::RmsNormBuffers> buffers;
          for (const runtime::Arrival& rank : ranks) {
            buffers.push_back(
                {rank.inputs[0], rank.inputs[1], rank.inputs[2], rank.outputs[0], rank.outputs[1]});
          }
          host::AllReduceRmsNorm(type, count / hidden, hidden, eps, buffers);
        });
  } catch (const std::exception& error) {
    return Failed(ToError(error));
  }
}

XLA_FFI_DEFINE_HANDLER(
    kOpenOrder,
    [](ChannelCall* call, xffi::Result<xffi::AnyBuffer> token, xffi::Dictionary) {
      return OpenOrder(call, token);
    },
    xffi::Ffi::Bind().Ctx<xffi::State<ChannelCall>>().Ret<xffi::AnyBuffer>().Attrs());

XLA_FFI_DEFINE_HANDLER(kAllReduce, AllReduce, BindChannelCall());
XLA_FFI_DEFINE_HANDLER(kAllReduceRmsNorm, AllReduceRmsNorm, BindChannelCall());

}  // namespace

void RegisterCommCpu(Registry& registry) {
  registry.AddType<ChannelCall>("b12x_channel_call");
  AddChannelCalls(registry, {{"b12x_open_order", kOpenOrder},
                             {"b12x_all_reduce", kAllReduce},
                             {"b12x_all_reduce_rms_norm", kAllReduceRmsNorm}});
}

}  // namespace b12x::ffi
