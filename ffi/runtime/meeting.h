// Where the ranks of a channel meet on the host: each leaves its buffers and goes on; the last to
// come does the work for all of them. No thread waits.
#ifndef JAX_B12X_FFI_RUNTIME_MEETING_H_
#define JAX_B12X_FFI_RUNTIME_MEETING_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/exchange.h"
#include "ffi/runtime/pool.h"

namespace b12x::runtime {

// What a rank brings to a meeting.
struct Arrival {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::function<void()> fill_nan;      // overwrites the outputs
  std::function<void(bool met)> done;  // unless all met, the channel says why
};

// Combines the arrivals of all ranks, in rank order.
using Combine = std::function<void(const std::vector<Arrival>&)>;

// The meetings of one channel. Ranks are matched by the run that they belong to and by how often
// they met in it, so that runs which overtake each other on some ranks cannot be mixed up.
class MeetingPlace : public ChannelMemory, public std::enable_shared_from_this<MeetingPlace> {
 public:
  MeetingPlace(std::string pool, int world_size, int64_t timeout_ms)
      : pool_(std::move(pool)), world_size_(world_size), timeout_ms_(timeout_ms) {}

  // `channel` is poisoned, and everybody who waits on it gets the error, when the other ranks do
  // not come within the timeout.
  void Arrive(const std::shared_ptr<Channel>& channel, int group, int64_t run, int rank,
              Arrival arrival, const Combine& combine);

  void Quiesce(int rank) override;
  void Release() override;
  void CloseImports(int rank) override;
  void FreeExports(int rank) override;
  bool reusable() const override { return true; }

 private:
  struct Meeting {
    std::vector<Arrival> arrivals;
    std::vector<bool> present;
    int count = 0;
    uint64_t serial = 0;
  };
  struct Run {
    std::vector<int64_t> next;            // by rank: how often it came
    std::map<int64_t, Meeting> meetings;  // by how many meetings came before
  };
  using RunKey = std::pair<int, int64_t>;  // group, run

  // Ends all meetings, once the channel is refused; the mutex is held. Returns who was there.
  std::vector<Arrival> TakeWaiting();
  static void Fail(std::vector<Arrival> arrivals);
  void Expire(const std::shared_ptr<Channel>& channel, RunKey key, int64_t number, uint64_t serial);

  const std::string pool_;
  const int world_size_;
  const int64_t timeout_ms_;
  std::mutex mutex_;
  std::map<RunKey, Run> runs_;
  uint64_t serials_ = 0;
};

// Ranks of one process: there is nothing to exchange.
Pool::MakeMemory MakeMeetingPlaces(Exchange exchange);

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_MEETING_H_
