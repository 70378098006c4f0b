// Work in ordered phases, shared among the threads that happen to be free.
#ifndef JAX_B12X_FFI_HOST_PARALLEL_H_
#define JAX_B12X_FFI_HOST_PARALLEL_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace b12x::host {

// Threads that may help. `schedule` may run its task at any time, in any thread, or much later.
struct Executor {
  int64_t num_threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

// Items that may run in any order, after all items of the phase before.
struct Phase {
  int64_t num_items = 0;
  std::function<void(int64_t item)> run;
};

// Runs all phases and returns when every item is done.
//
// The calling thread works too and waits only for items that a running thread has taken, never for
// a helper to start: a pool whose threads are all busy makes this slower, not stuck. A helper that
// starts after the return finds nothing left to take and touches nothing of the caller's.
void RunPhases(std::vector<Phase> phases, const Executor& executor, int64_t max_threads);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_PARALLEL_H_
