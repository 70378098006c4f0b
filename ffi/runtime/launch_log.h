// A record of what a call submitted, in order, for tests and for people who wonder. Off unless
// somebody turns it on; then calls of all threads are recorded.
#ifndef JAX_B12X_FFI_RUNTIME_LAUNCH_LOG_H_
#define JAX_B12X_FFI_RUNTIME_LAUNCH_LOG_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace b12x::runtime {

// One call.
struct LaunchRecord {
  std::string op;
  std::vector<std::string> steps;  // such as "fork" or "shared on aux", as they were submitted
  // Where a graph was being captured: what is in it once the call was submitted. Kernels go by
  // their names, other nodes by their kinds; an edge is a pair of places in `nodes`.
  std::vector<std::string> nodes;
  std::vector<std::pair<int, int>> edges;
};

class LaunchLog {
 public:
  static LaunchLog& Get() {
    // Never destroyed: calls may run while the process exits.
    static LaunchLog* const log = std::make_unique<LaunchLog>().release();
    return *log;
  }

  bool on() const { return on_.load(std::memory_order_relaxed); }
  void Turn(bool on) { on_.store(on, std::memory_order_relaxed); }
  void Add(LaunchRecord record) {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.push_back(std::move(record));
  }
  std::vector<LaunchRecord> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(records_, {});
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<LaunchRecord> records_;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_LAUNCH_LOG_H_
