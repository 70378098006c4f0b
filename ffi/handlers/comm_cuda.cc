// The all-reduces on the `CUDA` platform: decodes operands, finds the channel, launches one kernel.
#include <cuda_runtime_api.h>

#include "cuda/kernels/oneshot_all_reduce.h"
#include "ffi/handlers/channel_call_cuda.h"
#include "ffi/handlers/families.h"
#include "ffi/runtime/peer_memory.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error Invalid(const char* message) { return xffi::Error::InvalidArgument(message); }

xffi::Error OpenOrder(cudaStream_t stream, ChannelCall* call, int32_t device,
                      xffi::Result<xffi::AnyBuffer> token, xffi::Dictionary) {
  if (xffi::Error error = CheckToken(*token); error.failure()) return error;
  try {
    return Launched(
        comm::LaunchOpenOrder(MemoryOf(*call).DeviceViewOf(device), token->untyped_data(), stream),
        "b12x_open_order");
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

xffi::Error AllReduce(cudaStream_t stream, ChannelCall* call, int32_t device,
                      xffi::RemainingArgs args, xffi::RemainingRets rets, xffi::Dictionary attrs) {
  auto x = args.get<xffi::AnyBuffer>(0);
  auto out = rets.get<xffi::AnyBuffer>(0);
  const auto bytes = attrs.get<int64_t>("bytes");
  comm::FloatType type;
  if (!x || !out || !bytes || !ToFloatType(x->element_type(), &type)) {
    return Invalid("b12x_all_reduce takes x: f32, f16 or bf16");
  }
  const auto count = static_cast<int64_t>(x->element_count());
  if ((*out)->element_type() != x->element_type() ||
      static_cast<int64_t>((*out)->element_count()) != count ||
      static_cast<int64_t>(x->size_bytes()) > *bytes) {
    return Invalid("b12x_all_reduce: x is larger than its channel, or the result is not like x");
  }
  try {
    comm::ChannelRef channel;
    if (xffi::Error error = FindChannel(*call, device, args, rets, 1, 1, stream, &channel);
        error.failure()) {
      return error;
    }
    return Launched(comm::LaunchAllReduce(type, x->untyped_data(), (*out)->untyped_data(), count,
                                          channel, stream),
                    "b12x_all_reduce");
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

xffi::Error AllReduceRmsNorm(cudaStream_t stream, ChannelCall* call, int32_t device,
                             xffi::RemainingArgs args, xffi::RemainingRets rets,
                             xffi::Dictionary attrs) {
  auto x = args.get<xffi::AnyBuffer>(0);
  auto residual = args.get<xffi::AnyBuffer>(1);
  auto weight = args.get<xffi::AnyBuffer>(2);
  auto normed = rets.get<xffi::AnyBuffer>(0);
  auto new_residual = rets.get<xffi::AnyBuffer>(1);
  const auto bytes = attrs.get<int64_t>("bytes");
  const auto eps = attrs.get<float>("eps");
  comm::FloatType type;
  if (!x || !residual || !weight || !normed || !new_residual || !bytes || !eps ||
      !ToFloatType(x->element_type(), &type)) {
    return Invalid("b12x_all_reduce_rms_norm takes x, residual and weight: f32, f16 or bf16");
  }
  const auto count = static_cast<int64_t>(x->element_count());
  const auto hidden = static_cast<int64_t>(weight->element_count());
  for (const xffi::AnyBuffer& each : {*residual, **normed, **new_residual}) {
    if (each.element_type() != x->element_type() ||
        static_cast<int64_t>(each.element_count()) != count) {
      return Invalid("b12x_all_reduce_rms_norm: residual and results must be like x");
    }
  }
  if (weight->element_type() != x->element_type() || hidden == 0 || count % hidden != 0) {
    return Invalid("b12x_all_reduce_rms_norm: weight must be [hidden] of x's dtype");
  }
  const int64_t rows = count / hidden;
  const int64_t row_bytes = hidden * comm::ByteWidth(type);
  const int64_t row_packets = (row_bytes + comm::kPacketBytes - 1) / comm::kPacketBytes;
  if (row_packets > comm::kMaxRowPackets || rows * row_packets * comm::kPacketBytes > *bytes) {
    return Invalid("b12x_all_reduce_rms_norm: x is larger than its channel or its rows too long");
  }
  try {
    comm::ChannelRef channel;
    if (xffi::Error error = FindChannel(*call, device, args, rets, 3, 2, stream, &channel);
        error.failure()) {
      return error;
    }
    return Launched(comm::LaunchAllReduceRmsNorm(type, x->untyped_data(), residual->untyped_data(),
                                                 weight->untyped_data(), (*normed)->untyped_data(),
                                                 (*new_residual)->untyped_data(), rows, hidden,
                                                 *eps, channel, stream),
                    "b12x_all_reduce_rms_norm");
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

XLA_FFI_DEFINE_HANDLER(kOpenOrder, OpenOrder,
                       xffi::Ffi::Bind()
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Ctx<xffi::State<ChannelCall>>()
                           .Ctx<xffi::DeviceOrdinal>()
                           .Ret<xffi::AnyBuffer>()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kAllReduce, AllReduce, BindChannelCall(),
                       {xffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAllReduceRmsNorm, AllReduceRmsNorm, BindChannelCall(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterCommCuda(Registry& registry) {
  registry.AddType<ChannelCall>("b12x_channel_call");
  AddChannelCalls(registry, {{"b12x_open_order", kOpenOrder},
                             {"b12x_all_reduce", kAllReduce},
                             {"b12x_all_reduce_rms_norm", kAllReduceRmsNorm}});
}

}  // namespace b12x::ffi
