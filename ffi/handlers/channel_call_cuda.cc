#include "ffi/handlers/channel_call_cuda.h"

#include <string>

#include "ffi/registry.h"

namespace b12x::ffi {

namespace xffi = xla::ffi;

xffi::Error Launched(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return xffi::Error::Success();
  return xffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

bool ToFloatType(xffi::DataType type, comm::FloatType* result) {
  switch (type) {
    case xffi::F32:
      *result = comm::FloatType::kF32;
      return true;
    case xffi::F16:
      *result = comm::FloatType::kF16;
      return true;
    case xffi::BF16:
      *result = comm::FloatType::kBF16;
      return true;
    default:
      return false;
  }
}

runtime::PeerMemory& MemoryOf(const ChannelCall& call) {
  return static_cast<runtime::PeerMemory&>(call.lease->channel().memory());
}

namespace {

// Runs before every execution, of captured programs as well: refuses a channel that a device has
// reported a timeout on.
xffi::Error InitializeChannelCall(ChannelCall* call, xffi::Dictionary) {
  if (!call->lease.has_value()) return xffi::Error::Success();  // its order was looked at
  runtime::Channel& channel = call->lease->channel();
  channel.Check(call->pool->options().name);
  if (channel.refused()) return Refusal(channel);
  try {
    MemoryOf(*call).Connect();
    return xffi::Error::Success();
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

}  // namespace

xffi::Error FindChannel(const ChannelCall& call, int32_t device, xffi::RemainingArgs args,
                        xffi::RemainingRets rets, size_t num_args, size_t num_rets,
                        cudaStream_t stream, comm::ChannelRef* channel) {
  channel->world_size = call.pool->options().world_size;
  if (call.lease.has_value()) {
    channel->view = MemoryOf(call).ViewOf(device);
    return xffi::Error::Success();
  }
  auto token = args.get<xffi::AnyBuffer>(num_args);
  auto passed_on = rets.get<xffi::AnyBuffer>(num_rets);
  if (!token || !passed_on) {
    return xffi::Error::InvalidArgument("an ordered call needs its order token");
  }
  if (xffi::Error error = CheckToken(*token); error.failure()) return error;
  if (xffi::Error error = CheckToken(**passed_on); error.failure()) return error;
  channel->token = token->untyped_data();
  if ((*passed_on)->untyped_data() == token->untyped_data()) return xffi::Error::Success();
  return Launched(cudaMemcpyAsync((*passed_on)->untyped_data(), token->untyped_data(),
                                  token->size_bytes(), cudaMemcpyDeviceToDevice, stream),
                  "passing the order token on");
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateChannelCall, xffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    kInitialize, InitializeChannelCall,
    xffi::Ffi::Bind<xffi::ExecutionStage::kInitialize>().Ctx<xffi::State<ChannelCall>>().Attrs());

void AddChannelCalls(Registry& registry, std::initializer_list<NamedCall> calls) {
  Stages stages;
  stages.instantiate = kInstantiate;
  stages.initialize = kInitialize;
  for (const NamedCall& call : calls) {
    stages.execute = call.execute;
    registry.AddTarget(call.target, stages);
  }
}

}  // namespace b12x::ffi
