#include "ffi/runtime/peer_memory.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "ffi/runtime/cuda_check.h"

namespace b12x::runtime {

class PeerWords {
 public:
  explicit PeerWords(const std::vector<Place>& places) {
    RelaxedCapture relaxed;
    for (const Place& place : places) {
      DeviceGuard device(place.ordinal);
      void* word = nullptr;
      CudaCheck(cudaMalloc(&word, sizeof(unsigned long long)), "cudaMalloc");
      stalled_at_[place.ordinal] = static_cast<unsigned long long*>(word);
      CudaCheck(cudaMemset(word, 0, sizeof(unsigned long long)), "cudaMemset");
    }
  }
  PeerWords(const PeerWords&) = delete;
  PeerWords& operator=(const PeerWords&) = delete;
  ~PeerWords() {
    for (const auto& [ordinal, word] : stalled_at_) cudaFree(word);
    for (comm::ChannelStatus* chunk : chunks_) cudaFreeHost(chunk);
  }

  unsigned long long* stalled_at(int ordinal) const { return stalled_at_.at(ordinal); }

  comm::ChannelStatus* TakeStatus() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      constexpr int kChunk = 1024;
      void* memory = nullptr;
      CudaCheck(cudaHostAlloc(&memory, kChunk * sizeof(comm::ChannelStatus),
                              cudaHostAllocPortable | cudaHostAllocMapped),
                "cudaHostAlloc");
      chunks_.push_back(static_cast<comm::ChannelStatus*>(memory));
      for (int i = 0; i < kChunk; ++i) free_.push_back(chunks_.back() + i);
    }
    comm::ChannelStatus* status = free_.back();
    free_.pop_back();
    *status = {};
    return status;
  }
  void GiveBackStatus(comm::ChannelStatus* status) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(status);
  }

 private:
  std::mutex mutex_;
  std::map<int, unsigned long long*> stalled_at_;
  std::vector<comm::ChannelStatus*> chunks_;
  std::vector<comm::ChannelStatus*> free_;
};

PeerMemory::PeerMemory(std::shared_ptr<PeerWords> words, const PoolOptions& options, int64_t id,
                       const ChannelSpec& spec, Exchange exchange)
    : words_(std::move(words)),
      timeout_ms_(options.timeout_ms),
      id_(id),
      exchange_(std::move(exchange)) {
  RelaxedCapture relaxed;
  const int64_t slot_bytes =
      (spec.bytes + comm::kLineBytes - 1) / comm::kLineBytes * comm::kLineBytes;
  const int64_t slots_bytes = comm::kBuffers * (options.world_size - 1) * slot_bytes;
  // The destructor does not run when this throws: what was taken is given back here.
  try {
    for (const Place& place : options.places) {
      DeviceGuard device(place.ordinal);
      Slab& slab = slabs_.emplace_back();
      slab.place = place;
      void* data = nullptr;
      CudaCheck(cudaMalloc(&data, comm::kHeaderBytes + slots_bytes), "cudaMalloc of a channel");
      slab.data = static_cast<unsigned char*>(data);
      slab.status = words_->TakeStatus();
    }
    for (Slab& slab : slabs_) {
      comm::ChannelView& view = slab.view;
      for (const Slab& peer : slabs_) {
        if (peer.place.group == slab.place.group) view.slabs[peer.place.rank] = peer.data;
      }
      view.status = const_cast<comm::ChannelStatus*>(slab.status);
      view.stalled_at = words_->stalled_at(slab.place.ordinal);
      view.timeout_ns = static_cast<unsigned long long>(options.timeout_ms) * 1'000'000;
      view.slot_bytes = slot_bytes;
      view.rank = slab.place.rank;
      view.world_size = options.world_size;

      DeviceGuard device(slab.place.ordinal);
      CudaCheck(cudaMemset(slab.data, 0, comm::kHeaderBytes), "cudaMemset");
      CudaCheck(cudaMemset(slab.data + comm::kHeaderBytes, 0xFF, slots_bytes), "cudaMemset");
      Upload(slab);
      // Peers may push as soon as we return.
      CudaCheck(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
    }
    if (exchange_.publish != nullptr) {
      std::vector<std::tuple<int, uintptr_t>> offered;
      for (const Slab& slab : slabs_) {
        offered.emplace_back(slab.place.ordinal, reinterpret_cast<uintptr_t>(slab.data));
      }
      exchange_.publish(id, spec.op, spec.program, spec.site, spec.lane, spec.bytes, offered);
    } else {
      connected_.store(true, std::memory_order_release);
    }
  } catch (...) {
    for (const Slab& slab : slabs_) cudaFree(slab.data);
    throw;
  }
}

void PeerMemory::Upload(const Slab& slab) {
  DeviceGuard device(slab.place.ordinal);
  CudaCheck(cudaMemcpy(slab.data + offsetof(comm::ChannelHeader, view), &slab.view,
                       sizeof(slab.view), cudaMemcpyHostToDevice),
            "cudaMemcpy");
}

void PeerMemory::ConnectNow() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (connected_.load(std::memory_order_relaxed)) return;
  RelaxedCapture relaxed;
  const auto found = exchange_.connect(id_);
  for (Slab& slab : slabs_) {
    for (const auto& [ordinal, rank, address] : found) {
      if (ordinal == slab.place.ordinal) {
        slab.view.slabs[rank] = reinterpret_cast<unsigned char*>(address);
      }
    }
    Upload(slab);
  }
  connected_.store(true, std::memory_order_release);
}

// Slabs are freed by the teardown, or withheld by it on purpose.
PeerMemory::~PeerMemory() {
  for (const Slab& slab : slabs_) {
    if (slab.data == nullptr) {
      words_->GiveBackStatus(const_cast<comm::ChannelStatus*>(slab.status));
    }
  }
}

const PeerMemory::Slab& PeerMemory::SlabOf(int ordinal) const {
  for (const Slab& slab : slabs_) {
    if (slab.place.ordinal == ordinal) return slab;
  }
  throw ChannelError("the channel has no memory on device " + std::to_string(ordinal));
}

const comm::ChannelView& PeerMemory::ViewOf(int ordinal) const { return SlabOf(ordinal).view; }

const comm::ChannelView* PeerMemory::DeviceViewOf(int ordinal) const {
  return &reinterpret_cast<const comm::ChannelHeader*>(SlabOf(ordinal).data)->view;
}

void PeerMemory::Quiesce(int rank) {
  for (const Slab& slab : slabs_) {
    if (slab.place.rank != rank) continue;
    DeviceGuard device(slab.place.ordinal);
    // Our kernels end within their timeout.
    CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
}

// Peers of one process reach each other's memory without mapping it; what was mapped of other
// processes is unmapped by whoever mapped it.
void PeerMemory::CloseImports(int /*rank*/) {}

void PeerMemory::FreeExports(int rank) {
  std::string failure;
  for (Slab& slab : slabs_) {
    if (slab.place.rank != rank || slab.data == nullptr) continue;
    const cudaError_t error = cudaFree(slab.data);
    slab.data = nullptr;
    if (error != cudaSuccess) failure = cudaGetErrorString(error);
  }
  if (!failure.empty()) throw ChannelError("cudaFree of a channel failed: " + failure);
}

std::string PeerMemory::Fault() const {
  for (const Slab& slab : slabs_) {
    if (slab.status->failed == 0) continue;
    std::string missing;
    for (int rank = 0; rank < slab.view.world_size; ++rank) {
      if ((slab.status->missing >> rank & 1) != 0) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    return "rank " + missing + " did not arrive within the timeout of " +
           std::to_string(timeout_ms_) + " ms (rank " + std::to_string(slab.place.rank) +
           " waited)";
  }
  return "";
}

Pool::MakeMemory MakePeerMemory(Exchange exchange) {
  // One for the pool that this is made for, when it needs its first channel.
  auto words = std::make_shared<std::shared_ptr<PeerWords>>();
  return [words, exchange = std::move(exchange)](const Pool& pool, int64_t id,
                                                 const ChannelSpec& spec) {
    if (*words == nullptr) *words = std::make_shared<PeerWords>(pool.options().places);
    return std::make_shared<PeerMemory>(*words, pool.options(), id, spec, exchange);
  };
}

std::string PeerObstacle(const std::vector<int>& ordinals) {
  RelaxedCapture relaxed;
  for (const int from : ordinals) {
    DeviceGuard device(from);
    for (const int to : std::set<int>(ordinals.begin(), ordinals.end())) {
      if (from == to) continue;
      int possible = 0;
      CudaCheck(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
      if (possible == 0) {
        return "GPU " + std::to_string(from) + " cannot access the memory of GPU " +
               std::to_string(to);
      }
      const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();  // JAX was here before us
      } else {
        CudaCheck(error, "cudaDeviceEnablePeerAccess");
      }
    }
  }
  return "";
}

}  // namespace b12x::runtime
