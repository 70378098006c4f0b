// XLA's threads, as the host kernels take them.
#ifndef JAX_B12X_FFI_HANDLERS_HOST_EXECUTOR_H_
#define JAX_B12X_FFI_HANDLERS_HOST_EXECUTOR_H_

#include <functional>
#include <utility>

#include "ffi/host/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// `pool` has to outlive it.
inline host::Executor ExecutorOf(xla::ffi::ThreadPool& pool) {
  host::Executor executor;
  executor.num_threads = pool.num_threads();
  executor.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return executor;
}

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_HOST_EXECUTOR_H_
