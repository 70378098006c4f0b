// Channels of GPUs: a slab on each, which all peers write into. The peers are in this process, or
// in others that map the slab.
#ifndef JAX_B12X_FFI_RUNTIME_PEER_MEMORY_H_
#define JAX_B12X_FFI_RUNTIME_PEER_MEMORY_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/comm/channel.h"
#include "ffi/runtime/exchange.h"
#include "ffi/runtime/pool.h"

namespace b12x::runtime {

// What the channels of a pool share: words in pinned memory that kernels report faults in, and
// words on each device. Freed with the last channel.
class PeerWords;

class PeerMemory : public ChannelMemory {
 public:
  PeerMemory(std::shared_ptr<PeerWords> words, const PoolOptions& options, int64_t id,
             const ChannelSpec& spec, Exchange exchange);
  ~PeerMemory() override;

  // Finds the slabs of other processes, the first time; afterwards it takes no time. Throws when a
  // peer does not offer its slab in time.
  void Connect() {
    if (!connected_.load(std::memory_order_acquire)) ConnectNow();
  }

  // The channel as the kernels on the device with this ordinal see it.
  const comm::ChannelView& ViewOf(int ordinal) const;
  // The same, in the memory of that device.
  const comm::ChannelView* DeviceViewOf(int ordinal) const;

  void Quiesce(int rank) override;
  void CloseImports(int rank) override;
  void FreeExports(int rank) override;
  std::string Fault() const override;
  // A peer in another process may not have dropped its part yet.
  bool reusable() const override { return exchange_.connect == nullptr; }

 private:
  struct Slab {
    Place place;
    unsigned char* data = nullptr;
    comm::ChannelView view = {};
    volatile comm::ChannelStatus* status = nullptr;
  };
  const Slab& SlabOf(int ordinal) const;
  void ConnectNow();
  // Copies a slab's view to its device.
  static void Upload(const Slab& slab);

  const std::shared_ptr<PeerWords> words_;
  const int64_t timeout_ms_;
  const int64_t id_;
  const Exchange exchange_;
  std::atomic<bool> connected_{false};
  std::mutex mutex_;
  std::vector<Slab> slabs_;
};

Pool::MakeMemory MakePeerMemory(Exchange exchange);

// Why these devices cannot write into each other's memory; empty when they can. Lets them.
std::string PeerObstacle(const std::vector<int>& ordinals);

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_PEER_MEMORY_H_
