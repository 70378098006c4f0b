#include "ffi/host/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "ffi/host/float_mode.h"

namespace b12x::host {
namespace {

// How often a thread looks whether a phase is over before it goes to sleep: about the time that
// one item takes.
constexpr int kSpins = 2000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the caller and its helpers share. Helpers that start late keep it alive.
class Work {
 public:
  explicit Work(std::vector<Phase> phases) {
    for (Phase& phase : phases) states_.emplace_back(std::move(phase));
  }

  // Takes items until there are none; returns when all items of all phases are done.
  void Run() {
    const ScopedFloatMode float_mode;
    for (State& state : states_) {
      const int64_t num_items = state.phase.num_items;
      for (;;) {
        const int64_t item = state.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= num_items) break;
        state.phase.run(item);
        if (state.done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_items) WakeAll();
      }
      WaitFor(state);
    }
  }

 private:
  struct State {
    explicit State(Phase p) : phase(std::move(p)) {}
    bool Finished() const { return done.load(std::memory_order_acquire) >= phase.num_items; }

    Phase phase;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };

  void WakeAll() {
    // The lock orders this with a waiter that has just seen the phase unfinished.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    finished_.notify_all();
  }

  void WaitFor(const State& state) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (state.Finished()) return;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return state.Finished(); });
  }

  std::deque<State> states_;
  std::mutex mutex_;
  std::condition_variable finished_;
};

}  // namespace

void RunPhases(std::vector<Phase> phases, const Executor& executor, int64_t max_threads) {
  int64_t widest = 1;
  for (const Phase& phase : phases) widest = std::max(widest, phase.num_items);
  const int64_t threads = std::min({executor.num_threads, max_threads, widest});
  const auto work = std::make_shared<Work>(std::move(phases));
  for (int64_t helper = 1; helper < threads; ++helper) {
    executor.schedule([work] { work->Run(); });
  }
  work->Run();
}

}  // namespace b12x::host
