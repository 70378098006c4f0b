// What the collectives of the `cpu` platform have in common: finding the channel and meeting the
// other ranks there. The result is a future, so that no thread waits for another rank.
#ifndef JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_CPU_H_
#define JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_CPU_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ffi/handlers/channel_call.h"
#include "ffi/host/all_reduce.h"
#include "ffi/runtime/meeting.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// A call that failed before it met anybody.
xla::ffi::Future Failed(xla::ffi::Error error);

xla::ffi::ErrorOr<host::FloatType> FloatTypeOf(xla::ffi::DataType type);

// Makes `token` name `channel`.
void WriteToken(const runtime::Channel& channel, void* token);

// The channel of a call: its own, or the one that the token behind the first `num_args` operands
// names. The token is passed on, to the result behind the first `num_rets`.
std::shared_ptr<runtime::Channel> FindChannel(const ChannelCall& call,
                                              const xla::ffi::RemainingArgs& args,
                                              const xla::ffi::RemainingRets& rets, size_t num_args,
                                              size_t num_rets);

// Meets the other ranks on the channel.
xla::ffi::Future Meet(const ChannelCall& call, const std::shared_ptr<runtime::Channel>& channel,
                      int32_t device, xla::ffi::RunId run, runtime::Arrival arrival,
                      const runtime::Combine& combine);

// What *execute* of a channel call takes.
inline auto BindChannelCall() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::State<ChannelCall>>()
      .Ctx<xla::ffi::RunId>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_CPU_H_
