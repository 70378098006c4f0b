// The exchanges of decode context parallelism on the `CUDA` platform: decodes operands, finds the
// channel, launches one kernel.
#include <cuda_runtime_api.h>

#include "cuda/kernels/dcp.h"
#include "ffi/handlers/channel_call_cuda.h"
#include "ffi/handlers/dcp_operands.h"
#include "ffi/handlers/families.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error CheckCapacity(int64_t message_bytes, const xffi::Dictionary& attrs) {
  const auto bytes = attrs.get<int64_t>("bytes");
  if (bytes && message_bytes <= *bytes) return xffi::Error::Success();
  return xffi::Error::InvalidArgument("the message is larger than its channel");
}

xffi::Error DcpCombine(cudaStream_t stream, ChannelCall* call, int32_t device,
                       xffi::RemainingArgs args, xffi::RemainingRets rets, xffi::Dictionary attrs) {
  const auto decoded = DecodeCombine(args, rets, attrs, call->pool->options().world_size);
  if (decoded.has_error()) return decoded.error();
  const CombineOperands& operands = *decoded;
  if (xffi::Error error = CheckCapacity(operands.message_bytes, attrs); error.failure()) {
    return error;
  }
  comm::FloatType type;
  if (!ToFloatType(operands.type, &type)) {
    return xffi::Error::InvalidArgument("b12x_dcp_combine takes f32, f16 or bf16");
  }
  try {
    comm::ChannelRef channel;
    if (xffi::Error error = FindChannel(*call, device, args, rets, operands.num_args,
                                        operands.num_rets, stream, &channel);
        error.failure()) {
      return error;
    }
    return Launched(comm::LaunchDcpCombine(
                        type, {operands.partial, operands.lse, operands.out, operands.out_lse},
                        operands.rows, operands.head_dim, operands.base_two, channel, stream),
                    "b12x_dcp_combine");
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

xffi::Error DcpGather(cudaStream_t stream, ChannelCall* call, int32_t device,
                      xffi::RemainingArgs args, xffi::RemainingRets rets, xffi::Dictionary attrs) {
  const auto decoded = DecodeGather(args, rets, attrs, call->pool->options().world_size);
  if (decoded.has_error()) return decoded.error();
  if (xffi::Error error = CheckCapacity(decoded->message_bytes, attrs); error.failure()) {
    return error;
  }
  comm::GatherTensor tensors[2];
  const size_t count = decoded->tensors.size();
  for (size_t i = 0; i < count; ++i) {
    const GatherOperands::Tensor& tensor = decoded->tensors[i];
    tensors[i] = {tensor.part, tensor.whole, tensor.part_bytes(), tensor.row_bytes};
  }
  try {
    comm::ChannelRef channel;
    if (xffi::Error error = FindChannel(*call, device, args, rets, count, count, stream, &channel);
        error.failure()) {
      return error;
    }
    return Launched(comm::LaunchDcpGather(tensors[0], tensors[1], channel, stream),
                    "b12x_dcp_gather");
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

XLA_FFI_DEFINE_HANDLER(kDcpCombine, DcpCombine, BindChannelCall(),
                       {xffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDcpGather, DcpGather, BindChannelCall(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

// The type of the state is registered with the all-reduces.
void RegisterDcpCuda(Registry& registry) {
  AddChannelCalls(registry, {{"b12x_dcp_combine", kDcpCombine}, {"b12x_dcp_gather", kDcpGather}});
}

}  // namespace b12x::ffi
