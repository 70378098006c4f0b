// The order in which a block submits its work: the one place that knows it, for every platform.
#ifndef JAX_B12X_FFI_HANDLERS_BLOCK_PROGRAM_H_
#define JAX_B12X_FFI_HANDLERS_BLOCK_PROGRAM_H_

#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// How the shared expert's work stands to the rest.
enum class BlockOrder {
  kConcurrent,   // submitted before the router and the routed launches, joined after them
  kPreResident,  // submitted before the router, joined before the routed launch is submitted
  kSerial,       // after the routed launches, on the same stream
  kJoined,       // none of its own: the shared expert is one of the routed ones
};

enum class BlockStream { kMain, kAux };

struct BlockProgram {
  BlockOrder order = BlockOrder::kSerial;
  bool router = false;
  bool shared = false;
};

xla::ffi::Error ReadBlockOrder(std::string_view name, BlockOrder* order);

// Where work is submitted to.
class LaunchSink {
 public:
  virtual ~LaunchSink() = default;
  // From here on the auxiliary stream may run: it waits for all that is on the main stream.
  virtual xla::ffi::Error Fork() = 0;
  // The main stream waits for all that is on the auxiliary one.
  virtual xla::ffi::Error Join() = 0;
  virtual xla::ffi::Error Router() = 0;
  virtual xla::ffi::Error Routed() = 0;
  virtual xla::ffi::Error Shared(BlockStream stream) = 0;
  // The sum of the routed and the shared result.
  virtual xla::ffi::Error Add() = 0;
};

// Passes everything on and writes down what it was.
class RecordingSink : public LaunchSink {
 public:
  explicit RecordingSink(LaunchSink& to) : to_(to) {}

  xla::ffi::Error Fork() override { return steps_.push_back("fork"), to_.Fork(); }
  xla::ffi::Error Join() override { return steps_.push_back("join"), to_.Join(); }
  xla::ffi::Error Router() override { return steps_.push_back("router"), to_.Router(); }
  xla::ffi::Error Routed() override { return steps_.push_back("routed"), to_.Routed(); }
  xla::ffi::Error Shared(BlockStream stream) override {
    steps_.push_back(stream == BlockStream::kAux ? "shared on aux" : "shared");
    return to_.Shared(stream);
  }
  xla::ffi::Error Add() override { return steps_.push_back("add"), to_.Add(); }

  const std::vector<std::string>& steps() const { return steps_; }

 private:
  LaunchSink& to_;
  std::vector<std::string> steps_;
};

// Submits the program; after an error nothing more is submitted, except that a fork is joined.
xla::ffi::Error Submit(const BlockProgram& program, LaunchSink& sink);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_BLOCK_PROGRAM_H_
