// The part of a workspace that is on a GPU.
#ifndef JAX_B12X_FFI_RUNTIME_WORKSPACE_CUDA_H_
#define JAX_B12X_FFI_RUNTIME_WORKSPACE_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "ffi/runtime/workspace.h"

namespace b12x::runtime {

class CudaWorkspace : public DeviceWorkspace {
 public:
  // `stream` is what executions run on.
  CudaWorkspace(const WorkspacePoolOptions& pool, const WorkspaceSpec& spec, int ordinal,
                cudaStream_t stream);
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;
  ~CudaWorkspace() override;

  // `spec.bytes` of device memory, zero at first. Null when that is none.
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // In pinned host memory: whatever a kernel writes that is not zero is a fault. Kernels reach it
  // under the same address.
  uint32_t* fault_word() const { return fault_word_; }
  uint64_t timeout_ns() const { return timeout_ns_; }
  // Null unless the call site asked for a stream. A stream that takes part in a capture does so
  // until the whole capture ends, when another thread may be running the program eagerly: each has
  // its own. Events keep no time.
  cudaStream_t aux_stream(bool capturing) const { return aux_streams_[capturing ? 1 : 0]; }
  cudaEvent_t fork_event() const { return fork_event_; }
  cudaEvent_t join_event() const { return join_event_; }
  // Held while a call is submitted that uses the stream and events.
  std::unique_lock<std::mutex> LockSubmission() { return std::unique_lock(submission_); }

  void Quiesce() override;
  bool faulty() const override { return *static_cast<volatile uint32_t*>(fault_word_) != 0; }
  std::string Fault() const override;
  void Reset(void* stream) override;

 private:
  void Release();

  const int ordinal_;
  const int64_t bytes_;
  const uint64_t timeout_ns_;
  std::mutex submission_;
  void* data_ = nullptr;
  uint32_t* fault_word_ = nullptr;
  cudaStream_t aux_streams_[2] = {};
  cudaEvent_t fork_event_ = nullptr;
  cudaEvent_t join_event_ = nullptr;
};

std::unique_ptr<DeviceWorkspace> MakeCudaWorkspace(const WorkspacePoolOptions& pool,
                                                   const WorkspaceSpec& spec, int ordinal,
                                                   void* stream);

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_WORKSPACE_CUDA_H_
