#include "ffi/handlers/channel_call_cpu.h"

#include <cstring>
#include <string>
#include <utility>

#include "ffi/registry.h"

namespace b12x::ffi {

namespace xffi = xla::ffi;

namespace {

struct Token {
  int64_t channel;
  int64_t reserved;
};
static_assert(sizeof(Token) == kTokenWords * sizeof(uint32_t));

}  // namespace

xffi::Future Failed(xffi::Error error) {
  xffi::Promise promise;
  xffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

xffi::ErrorOr<host::FloatType> FloatTypeOf(xffi::DataType type) {
  switch (type) {
    case xffi::F32:
      return host::FloatType::kF32;
    case xffi::F16:
      return host::FloatType::kF16;
    case xffi::BF16:
      return host::FloatType::kBF16;
    default:
      return xffi::Unexpected(xffi::Error::InvalidArgument("the message must be f32, f16 or bf16"));
  }
}

void WriteToken(const runtime::Channel& channel, void* token) {
  const Token content{channel.id(), 0};
  std::memcpy(token, &content, sizeof(content));
}

std::shared_ptr<runtime::Channel> FindChannel(const ChannelCall& call,
                                              const xffi::RemainingArgs& args,
                                              const xffi::RemainingRets& rets, size_t num_args,
                                              size_t num_rets) {
  if (call.lease.has_value()) return call.lease->shared_channel();
  const auto token = args.get<xffi::AnyBuffer>(num_args);
  auto passed_on = rets.get<xffi::AnyBuffer>(num_rets);
  if (!token || !passed_on || CheckToken(*token).failure() || CheckToken(**passed_on).failure()) {
    throw runtime::ChannelError("an ordered call needs its order token");
  }
  Token content;
  std::memcpy(&content, token->untyped_data(), sizeof(content));
  if ((*passed_on)->untyped_data() != token->untyped_data()) {
    std::memcpy((*passed_on)->untyped_data(), &content, sizeof(content));
  }
  std::shared_ptr<runtime::Channel> channel = call.pool->Find(content.channel);
  if (channel == nullptr) {
    throw runtime::ChannelError("pool '" + call.pool->options().name + "': channel " +
                                std::to_string(content.channel) + " is gone");
  }
  return channel;
}

xffi::Future Meet(const ChannelCall& call, const std::shared_ptr<runtime::Channel>& channel,
                  int32_t device, xffi::RunId run, runtime::Arrival arrival,
                  const runtime::Combine& combine) {
  xffi::Promise promise;
  xffi::Future future(promise);
  arrival.done = [promise, channel](bool met) mutable {
    met ? promise.SetAvailable() : promise.SetError(Refusal(*channel));
  };
  const runtime::Place& place = call.pool->PlaceOf(device);
  static_cast<runtime::MeetingPlace&>(channel->memory())
      .Arrive(channel, place.group, run.run_id, place.rank, std::move(arrival), combine);
  return future;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateChannelCall, xffi::Ffi::BindInstantiate().Attrs());

void AddChannelCalls(Registry& registry, std::initializer_list<NamedCall> calls) {
  Stages stages;
  stages.instantiate = kInstantiate;
  for (const NamedCall& call : calls) {
    stages.execute = call.execute;
    registry.AddTarget(call.target, stages);
  }
}

}  // namespace b12x::ffi
