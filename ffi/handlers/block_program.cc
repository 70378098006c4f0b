#include "ffi/handlers/block_program.h"

namespace b12x::ffi {
namespace {

using xla::ffi::Error;

Error SubmitForked(const BlockProgram& program, LaunchSink& sink) {
  Error error = sink.Fork();
  if (error.failure()) return error;
  error = sink.Shared(BlockStream::kAux);
  if (error.success() && program.router) error = sink.Router();
  const bool join_first = program.order == BlockOrder::kPreResident;
  if (error.success() && !join_first) error = sink.Routed();
  // Even after an error: the buffers may not be let go while the auxiliary stream uses them.
  const Error joined = sink.Join();
  if (error.success()) error = joined;
  if (error.success() && join_first) error = sink.Routed();
  if (error.success()) error = sink.Add();
  return error;
}

}  // namespace

Error ReadBlockOrder(std::string_view name, BlockOrder* order) {
  if (name == "concurrent") {
    *order = BlockOrder::kConcurrent;
  } else if (name == "pre_resident") {
    *order = BlockOrder::kPreResident;
  } else if (name == "serial") {
    *order = BlockOrder::kSerial;
  } else if (name == "joined") {
    *order = BlockOrder::kJoined;
  } else {
    return Error::InvalidArgument("b12x_moe_block: order is " + std::string(name) +
                                  "; it must be joined, concurrent, pre_resident or serial");
  }
  return Error::Success();
}

Error Submit(const BlockProgram& program, LaunchSink& sink) {
  if (program.shared && program.order != BlockOrder::kSerial) return SubmitForked(program, sink);
  Error error = Error::Success();
  if (program.router) error = sink.Router();
  if (error.success()) error = sink.Routed();
  if (error.success() && program.shared) error = sink.Shared(BlockStream::kMain);
  if (error.success() && program.shared) error = sink.Add();
  return error;
}

}  // namespace b12x::ffi
