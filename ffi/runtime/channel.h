// A channel: what one collective call site (or one ordered program, or one lane) uses on every rank
// of its group. Ownership is in the types: a `Lease` holds a channel, a `Pool` owns its memory.
#ifndef JAX_B12X_FFI_RUNTIME_CHANNEL_H_
#define JAX_B12X_FFI_RUNTIME_CHANNEL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace b12x::runtime {

// Everything that the runtime refuses, in words for the user.
class ChannelError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a call site asks for.
struct ChannelSpec {
  std::string op;       // the kind of call, or "open_order" for a channel that several calls share
  std::string program;  // the name of the program that the call site is in
  int64_t site = 0;     // the call site's number in its program
  std::string lane;     // the lane it was traced in; empty for none
  int64_t bytes = 0;    // the largest message, in bytes
};

// The memory behind a channel. Its owner takes it down step by step (`jax_b12x/comm/teardown.py`):
// destructors release nothing that another rank may still use.
class ChannelMemory {
 public:
  virtual ~ChannelMemory() = default;
  // Returns when no call that uses this memory is in flight on `rank`; throws when that takes
  // longer than the pool's timeout allows.
  virtual void Quiesce(int rank) = 0;
  // Every call is refused from now on: ends the calls that wait on the host for a rank to come.
  virtual void Release() {}
  virtual void CloseImports(int rank) = 0;
  virtual void FreeExports(int rank) = 0;
  // What a device has reported, for a person: empty while all is well. Cheap, and without a wait.
  virtual std::string Fault() const { return ""; }
  // Whether a new call site of this process may go on where a dropped one stopped.
  virtual bool reusable() const = 0;
};

class Channel {
 public:
  Channel(int64_t id, ChannelSpec spec, int64_t capacity, int64_t executable,
          std::shared_ptr<ChannelMemory> memory)
      : id_(id),
        spec_(std::move(spec)),
        capacity_(capacity),
        executable_(executable),
        memory_(std::move(memory)) {}

  int64_t id() const { return id_; }
  const ChannelSpec& spec() const { return spec_; }
  // The largest message that its slabs hold, in bytes.
  int64_t capacity() const { return capacity_; }
  // Numbers the executables of a pool in the order in which they were made.
  int64_t executable() const { return executable_; }
  ChannelMemory& memory() const { return *memory_; }
  const std::shared_ptr<ChannelMemory>& shared_memory() const { return memory_; }

  // "channel 7 (jit_step, call site 3)"
  std::string Name() const;

  // The reason why calls are refused; empty while there is none. The first reason stays.
  std::string refusal() const {
    if (!refused_.load(std::memory_order_acquire)) return "";
    std::lock_guard<std::mutex> lock(mutex_);
    return refusal_;
  }
  bool refused() const { return refused_.load(std::memory_order_acquire); }
  bool poisoned() const { return poisoned_.load(std::memory_order_acquire); }

  // A call timed out: its ranks may have got out of step, so no call may use the channel again.
  void Poison(const std::string& reason) {
    poisoned_.store(true, std::memory_order_release);
    Refuse(reason);
  }
  // Looks whether a device has reported a timeout, and poisons the channel if so.
  void Check(const std::string& pool) {
    if (refused()) return;
    const std::string fault = memory_->Fault();
    if (!fault.empty()) {
      Poison("pool '" + pool + "', " + Name() + ": " + fault +
             "; the channel is poisoned and its result is NaN");
    }
  }
  // The pool took the channel back.
  void Retire(const std::string& reason) {
    Refuse(reason);
    memory_->Release();
  }

 private:
  void Refuse(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refused_.load(std::memory_order_relaxed)) return;
    refusal_ = reason;
    refused_.store(true, std::memory_order_release);
  }

  const int64_t id_;
  const ChannelSpec spec_;
  const int64_t capacity_;
  const int64_t executable_;
  const std::shared_ptr<ChannelMemory> memory_;

  std::atomic<bool> refused_{false};
  std::atomic<bool> poisoned_{false};
  mutable std::mutex mutex_;
  std::string refusal_;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_CHANNEL_H_
