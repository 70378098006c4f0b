#include "ffi/runtime/workspace_cuda.h"

#include <mutex>
#include <vector>

#include "ffi/runtime/cuda_check.h"

namespace b12x::runtime {
namespace {

// Words in pinned host memory. Each has a cache line of its own in pages that are shared: pinning a
// page for every workspace would take more time than all the rest.
class FaultWords {
 public:
  static FaultWords& Get() {
    // Never destroyed: kernels may write while the process exits.
    static FaultWords* const words = std::make_unique<FaultWords>().release();
    return *words;
  }

  uint32_t* Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      void* page = nullptr;
      CudaCheck(cudaHostAlloc(&page, kPage, cudaHostAllocPortable | cudaHostAllocMapped),
                "cudaHostAlloc");
      for (int offset = 0; offset < kPage; offset += kLine) {
        free_.push_back(reinterpret_cast<uint32_t*>(static_cast<char*>(page) + offset));
      }
    }
    uint32_t* word = free_.back();
    free_.pop_back();
    *word = 0;
    return word;
  }
  void GiveBack(uint32_t* word) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(word);
  }

 private:
  static constexpr int kPage = 4096;
  static constexpr int kLine = 128;

  std::mutex mutex_;
  std::vector<uint32_t*> free_;
};

}  // namespace

CudaWorkspace::CudaWorkspace(const WorkspacePoolOptions& pool, const WorkspaceSpec& spec,
                             int ordinal, cudaStream_t stream)
    : ordinal_(ordinal),
      bytes_(spec.bytes),
      timeout_ns_(static_cast<uint64_t>(pool.timeout_ms) * 1'000'000) {
  RelaxedCapture relaxed;
  DeviceGuard device(ordinal);
  // The destructor does not run when this throws: what was taken is given back here.
  try {
    fault_word_ = FaultWords::Get().Take();
    if (bytes_ > 0) {
      CudaCheck(cudaMalloc(&data_, bytes_), "cudaMalloc of a workspace");
      CudaCheck(cudaMemsetAsync(data_, 0, bytes_, stream), "cudaMemsetAsync of a workspace");
    }
    if (spec.aux_stream) {
      // Non-blocking: the legacy stream of somebody else's code must not serialize it.
      for (cudaStream_t& aux : aux_streams_) {
        CudaCheck(cudaStreamCreateWithFlags(&aux, cudaStreamNonBlocking),
                  "cudaStreamCreateWithFlags");
      }
      for (cudaEvent_t* event : {&fork_event_, &join_event_}) {
        CudaCheck(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                  "cudaEventCreateWithFlags");
      }
    }
  } catch (...) {
    Release();
    throw;
  }
}

// What fails here fails because the driver is shutting down.
CudaWorkspace::~CudaWorkspace() {
  try {
    RelaxedCapture relaxed;
    DeviceGuard device(ordinal_);
    Release();
  } catch (const std::exception&) {
  }
}

void CudaWorkspace::Release() {
  if (fork_event_ != nullptr) cudaEventDestroy(fork_event_);
  if (join_event_ != nullptr) cudaEventDestroy(join_event_);
  for (const cudaStream_t aux : aux_streams_) {
    if (aux != nullptr) cudaStreamDestroy(aux);
  }
  if (data_ != nullptr) cudaFree(data_);
  if (fault_word_ != nullptr) FaultWords::Get().GiveBack(fault_word_);
}

void CudaWorkspace::Quiesce() {
  RelaxedCapture relaxed;
  DeviceGuard device(ordinal_);
  // Our kernels end within their timeout.
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

std::string CudaWorkspace::Fault() const {
  return "not all blocks of a resident grid came to its barrier";
}

// Executions that were dispatched since the fault come before it on the stream, and fail at once.
void CudaWorkspace::Reset(void* stream) {
  DeviceGuard device(ordinal_);
  if (data_ != nullptr) {
    CudaCheck(cudaMemsetAsync(data_, 0, bytes_, static_cast<cudaStream_t>(stream)),
              "cudaMemsetAsync of a workspace");
  }
  *static_cast<volatile uint32_t*>(fault_word_) = 0;
}

std::unique_ptr<DeviceWorkspace> MakeCudaWorkspace(const WorkspacePoolOptions& pool,
                                                   const WorkspaceSpec& spec, int ordinal,
                                                   void* stream) {
  return std::make_unique<CudaWorkspace>(pool, spec, ordinal, static_cast<cudaStream_t>(stream));
}

}  // namespace b12x::runtime
