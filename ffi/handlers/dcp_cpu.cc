// The exchanges of decode context parallelism on the `cpu` platform: decodes operands, finds the
// channel and hands the buffers to the meeting place.
#include <limits>
#include <utility>
#include <vector>

#include "ffi/handlers/channel_call_cpu.h"
#include "ffi/handlers/dcp_operands.h"
#include "ffi/handlers/families.h"
#include "ffi/host/all_reduce.h"
#include "ffi/host/dcp.h"
#include "ffi/runtime/meeting.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

void CheckCapacity(int64_t message_bytes, const runtime::Channel& channel) {
  if (message_bytes > channel.capacity()) {
    throw runtime::ChannelError("the message is larger than its channel");
  }
}

xffi::Future DcpCombine(ChannelCall* call, xffi::RunId run, int32_t device,
                        xffi::RemainingArgs args, xffi::RemainingRets rets,
                        xffi::Dictionary attrs) {
  try {
    const auto decoded = DecodeCombine(args, rets, attrs, call->pool->options().world_size);
    if (decoded.has_error()) return Failed(decoded.error());
    const CombineOperands& operands = *decoded;
    const auto type = FloatTypeOf(operands.type);
    if (type.has_error()) return Failed(type.error());
    const auto channel = FindChannel(*call, args, rets, operands.num_args, operands.num_rets);
    CheckCapacity(operands.message_bytes, *channel);
    runtime::Arrival arrival;
    arrival.inputs = {operands.partial, operands.lse};
    arrival.outputs = {operands.out, operands.out_lse};
    arrival.fill_nan = [operands, type = *type] {
      host::FillNan(type, operands.out_elements(), operands.out);
      if (operands.out_lse != nullptr) {
        host::FillNan(host::FloatType::kF32, operands.rows.count(), operands.out_lse);
      }
    };
    return Meet(*call, channel, device, run, std::move(arrival),
                [operands, type = *type](const std::vector<runtime::Arrival>& ranks) {
                  std::vector<host::CombineBuffers> buffers;
                  for (const runtime::Arrival& rank : ranks) {
                    buffers.push_back({rank.inputs[0], static_cast<const float*>(rank.inputs[1]),
                                       rank.outputs[0], static_cast<float*>(rank.outputs[1])});
                  }
                  host::DcpCombine(type, operands.rows, operands.head_dim, operands.base_two,
                                   buffers);
                });
  } catch (const std::exception& error) {
    return Failed(ToError(error));
  }
}

xffi::Future DcpGather(ChannelCall* call, xffi::RunId run, int32_t device, xffi::RemainingArgs args,
                       xffi::RemainingRets rets, xffi::Dictionary attrs) {
  try {
    const int world_size = call->pool->options().world_size;
    const auto decoded = DecodeGather(args, rets, attrs, world_size);
    if (decoded.has_error()) return Failed(decoded.error());
    const std::vector<GatherOperands::Tensor>& tensors = decoded->tensors;
    const auto channel = FindChannel(*call, args, rets, tensors.size(), tensors.size());
    CheckCapacity(decoded->message_bytes, *channel);
    runtime::Arrival arrival;
    for (const GatherOperands::Tensor& tensor : tensors) {
      arrival.inputs.push_back(tensor.part);
      arrival.outputs.push_back(tensor.whole);
    }
    arrival.fill_nan = [tensors, world_size] {
      for (const GatherOperands::Tensor& tensor : tensors) {
        host::FillNanBytes(tensor.part_bytes() * world_size, tensor.whole);
      }
    };
    return Meet(*call, channel, device, run, std::move(arrival),
                [tensors](const std::vector<runtime::Arrival>& ranks) {
                  for (size_t i = 0; i < tensors.size(); ++i) {
                    std::vector<host::GatherBuffers> buffers;
                    for (const runtime::Arrival& rank : ranks) {
                      buffers.push_back({rank.inputs[i], rank.outputs[i]});
                    }
                    host::DcpGather(tensors[i].outer, tensors[i].row_bytes, buffers);
                  }
                });
  } catch (const std::exception& error) {
    return Failed(ToError(error));
  }
}

XLA_FFI_DEFINE_HANDLER(kDcpCombine, DcpCombine, BindChannelCall());
XLA_FFI_DEFINE_HANDLER(kDcpGather, DcpGather, BindChannelCall());

}  // namespace

// The type of the state is registered with the all-reduces.
void RegisterDcpCpu(Registry& registry) {
  AddChannelCalls(registry, {{"b12x_dcp_combine", kDcpCombine}, {"b12x_dcp_gather", kDcpGather}});
}

}  // namespace b12x::ffi
