// What the handlers of every collective have in common: the lease that is taken when a program is
// made and ends with it, and the order token that calls of one program pass to each other.
#ifndef JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_H_
#define JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>

#include "ffi/runtime/pool.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

class Registry;

// The state of one call site in one executable.
struct ChannelCall {
  static xla::ffi::TypeId id;
  std::shared_ptr<runtime::Pool> pool;
  // Empty where the call gets its channel from an order token.
  std::optional<runtime::Lease> lease;
};

// The *instantiate* stage. Attributes: `pool`, `world_size` and `layout` of the pool that it was
// traced for, `program`, `site`, `lane`, `op`, `bytes`, and `ordered`, which is 1 when the call
// gets its channel from an order token.
xla::ffi::ErrorOr<std::unique_ptr<ChannelCall>> InstantiateChannelCall(xla::ffi::Dictionary attrs);

// An order token is four 32-bit words in a buffer of the program. Each call of an ordered program
// takes it and gives it back, which is what orders them; it also says which channel they use, so
// that a call cannot run outside that order.
inline constexpr int64_t kTokenWords = 4;

xla::ffi::Error CheckToken(const xla::ffi::AnyBuffer& token);

xla::ffi::Error ToError(const std::exception& error);

// Why calls on the channel are refused: a call timed out, or its pool took it back.
xla::ffi::Error Refusal(const runtime::Channel& channel);

struct NamedCall {
  const char* target;
  XLA_FFI_Handler* execute;
};

// Adds channel calls, which differ in nothing but *execute*. Each platform has its own.
void AddChannelCalls(Registry& registry, std::initializer_list<NamedCall> calls);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_H_
