// Threads for work that may wait: each piece gets a thread of its own, idle ones first.
#ifndef JAX_B12X_FFI_RUNTIME_CREW_H_
#define JAX_B12X_FFI_RUNTIME_CREW_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace b12x::runtime {

class Crew {
 public:
  static Crew& Get();

  // Runs `work` soon, whatever other pieces wait for.
  void Run(std::function<void()> work);

 private:
  void Serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  size_t idle_ = 0;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_CREW_H_
