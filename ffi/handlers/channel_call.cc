#include "ffi/handlers/channel_call.h"

#include <string_view>

namespace b12x::ffi {

namespace xffi = xla::ffi;

xffi::TypeId ChannelCall::id = {};

xffi::Error ToError(const std::exception& error) {
  return xffi::Error(xffi::ErrorCode::kFailedPrecondition, error.what());
}

xffi::Error Refusal(const runtime::Channel& channel) {
  return xffi::Error(channel.poisoned() ? xffi::ErrorCode::kDeadlineExceeded
                                        : xffi::ErrorCode::kFailedPrecondition,
                     channel.refusal());
}

xffi::ErrorOr<std::unique_ptr<ChannelCall>> InstantiateChannelCall(xffi::Dictionary attrs) {
  const auto pool = attrs.get<std::string_view>("pool");
  const auto program = attrs.get<std::string_view>("program");
  const auto lane = attrs.get<std::string_view>("lane");
  const auto op = attrs.get<std::string_view>("op");
  const auto site = attrs.get<int64_t>("site");
  const auto bytes = attrs.get<int64_t>("bytes");
  const auto ordered = attrs.get<int64_t>("ordered");
  const auto world_size = attrs.get<int64_t>("world_size");
  const auto layout = attrs.get<std::string_view>("layout");
  if (!pool || !program || !lane || !op || !site || !bytes || !ordered || !world_size || !layout) {
    return xffi::Unexpected(xffi::Error(
        xffi::ErrorCode::kInvalidArgument,
        "a channel call needs the attributes pool, layout, program, lane, op (strings), "
        "world_size, site, bytes and ordered (int64)"));
  }
  try {
    auto call = std::make_unique<ChannelCall>();
    call->pool = runtime::PoolRegistry::Get().Find(std::string(*pool));
    call->pool->CheckLayout(std::string(*program), *world_size, std::string(*layout));
    if (*ordered == 0) {
      runtime::ChannelSpec spec;
      spec.op = *op;
      spec.program = *program;
      spec.site = *site;
      spec.lane = *lane;
      spec.bytes = *bytes;
      call->lease.emplace(call->pool->Take(spec));
    }
    return call;
  } catch (const std::exception& error) {
    return xffi::Unexpected(ToError(error));
  }
}

xffi::Error CheckToken(const xffi::AnyBuffer& token) {
  if (token.element_type() == xffi::U32 && token.element_count() == kTokenWords) {
    return xffi::Error::Success();
  }
  return xffi::Error(xffi::ErrorCode::kInvalidArgument, "the order token must be u32[4]");
}

}  // namespace b12x::ffi
