// Pools own channels; leases hold them. The registry finds a pool by its name, which is all that a
// compiled program knows of it: a program may outlive the process that compiled it.
#ifndef JAX_B12X_FFI_RUNTIME_POOL_H_
#define JAX_B12X_FFI_RUNTIME_POOL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/runtime/channel.h"

namespace b12x::runtime {

// Who shares a channel.
enum class Isolation {
  kCallSite,    // nobody
  kExecutable,  // the call sites of one program, in the order that the program gives them
  kLane,        // the programs of one lane, in the order that their owner runs them in
};

// Where a device of this process stands in the pool's mesh.
struct Place {
  int ordinal = 0;  // the device's number in this process
  int group = 0;    // which of the groups side by side
  int rank = 0;     // its rank in the group
};

// The bytes that a channel takes on one rank. `jax_b12x/comm/memory.py` has the same formula for
// planning; a test holds the two together.
int64_t ChannelBytes(int64_t message_bytes, int world_size);

struct PoolOptions {
  std::string name;
  std::string axis;    // for messages only
  std::string layout;  // which device of the mesh is where, see `Topology.layout`
  Isolation isolation = Isolation::kCallSite;
  int world_size = 0;
  int num_groups = 1;
  std::vector<Place> places;
  int64_t timeout_ms = 0;
  int64_t max_bytes = 0;  // on one rank; 0 for no limit
};

class Pool;

// The hold that a compiled call site has on a channel. It ends with the executable.
class Lease {
 public:
  Lease(std::shared_ptr<Pool> pool, std::shared_ptr<Channel> channel)
      : pool_(std::move(pool)), channel_(std::move(channel)) {}
  Lease(Lease&&) = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease();

  Channel& channel() const { return *channel_; }
  const std::shared_ptr<Channel>& shared_channel() const { return channel_; }
  const Pool& pool() const { return *pool_; }

 private:
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<Channel> channel_;
};

// What `describe()` and the teardown see of a channel.
struct ChannelRecord {
  std::shared_ptr<Channel> channel;
  int64_t bytes = 0;
  int holders = 0;
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  using MakeMemory = std::function<std::shared_ptr<ChannelMemory>(const Pool&, int64_t id,
                                                                  const ChannelSpec& spec)>;

  Pool(PoolOptions options, MakeMemory make_memory)
      : options_(std::move(options)), make_memory_(std::move(make_memory)) {}

  const PoolOptions& options() const { return options_; }

  // Where the device stands; throws when the pool's mesh does not have it.
  const Place& PlaceOf(int ordinal) const;

  // Throws unless the program was traced for the places that the pool's devices have: a program
  // finds its pool by name, and the pool of that name may have been opened otherwise since.
  void CheckLayout(const std::string& program, int64_t world_size, const std::string& layout) const;

  // Takes a channel for a call site, or for an ordered program or lane.
  Lease Take(const ChannelSpec& spec);

  // Finds a channel that an ordered program passes around by number. Null when it is gone.
  std::shared_ptr<Channel> Find(int64_t id) const;

  // Channels taken from now on have this number or a higher one.
  int64_t next_id() const;
  std::vector<ChannelRecord> Records() const;
  int64_t bytes() const;

  // From now on every call on the channels numbered `first` and higher is refused with `reason`,
  // and, where `forever` is set, every new lease as well. Throws, and changes nothing, when
  // `require_idle` is set and an executable holds one of them.
  void Retire(int64_t first, const std::string& reason, bool forever, bool require_idle);
  // Forgets a retired channel.
  void Forget(int64_t id);

 private:
  friend class Lease;
  struct Entry {
    std::shared_ptr<Channel> channel;
    int64_t bytes = 0;
    int holders = 0;
    bool retired = false;
  };
  struct Need {
    int64_t executable = 0;
    std::string lane;
    int64_t bytes = 0;
  };

  void Release(const Channel& channel);
  int64_t ExecutableOf(const ChannelSpec& spec);
  int64_t BytesLocked() const;
  // What dropped executables have left, and how to free it; empty where there is nothing.
  std::string DroppedLocked() const;
  std::string WouldFit(const ChannelSpec& spec, int64_t executable) const;

  const PoolOptions options_;
  const MakeMemory make_memory_;
  mutable std::mutex mutex_;
  std::map<int64_t, Entry> entries_;
  std::map<int64_t, Need> needs_;  // by channel: what its first lease asked for
  int64_t next_id_ = 0;
  int64_t executables_ = 0;
  std::string closed_;
};

// The pools of this process, by name.
class PoolRegistry {
 public:
  static PoolRegistry& Get();

  // Throws when a pool of that name is open.
  std::shared_ptr<Pool> Open(PoolOptions options, Pool::MakeMemory make_memory);
  // Throws an error that says how to open it when there is none.
  std::shared_ptr<Pool> Find(const std::string& name) const;
  void Remove(const std::string& name);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Pool>> pools_;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_POOL_H_
