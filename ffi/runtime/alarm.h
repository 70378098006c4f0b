// Calls functions at given times, on one thread of its own.
#ifndef JAX_B12X_FFI_RUNTIME_ALARM_H_
#define JAX_B12X_FFI_RUNTIME_ALARM_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>

namespace b12x::runtime {

class Alarm {
 public:
  using Time = std::chrono::steady_clock::time_point;

  static Alarm& Get();

  // `ring` runs at `time` or soon after, and must be quick.
  void Set(Time time, std::function<void()> ring);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Time, std::function<void()>> pending_;
  bool running_ = false;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_ALARM_H_
