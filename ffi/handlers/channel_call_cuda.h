// What the collectives of the `CUDA` platform have in common: finding the channel, and refusing one
// that failed. *execute* may run under capture.
#ifndef JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_CUDA_H_
#define JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/comm/channel.h"
#include "ffi/handlers/channel_call.h"
#include "ffi/runtime/peer_memory.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// The outcome of a launch.
xla::ffi::Error Launched(cudaError_t error, const char* what);

bool ToFloatType(xla::ffi::DataType type, comm::FloatType* result);

runtime::PeerMemory& MemoryOf(const ChannelCall& call);

// Where the call finds its channel. A call of an ordered program passes its token on in place, from
// behind its first `num_args` operands to behind its first `num_rets` results.
xla::ffi::Error FindChannel(const ChannelCall& call, int32_t device, xla::ffi::RemainingArgs args,
                            xla::ffi::RemainingRets rets, size_t num_args, size_t num_rets,
                            cudaStream_t stream, comm::ChannelRef* channel);

// What *execute* of a channel call takes.
inline auto BindChannelCall() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .Ctx<xla::ffi::State<ChannelCall>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_CHANNEL_CALL_CUDA_H_
