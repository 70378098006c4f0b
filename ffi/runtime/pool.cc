#include "ffi/runtime/pool.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace b12x::runtime {
namespace {

// Epochs, the poison word and the addresses of the peers.
constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kLineBytes = 128;
constexpr int kBuffers = 2;

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Slabs of a shared channel come in powers of two, so that a lane has few of them.
int64_t SizeClass(int64_t bytes) {
  int64_t size = 4096;
  while (size < bytes) size *= 2;
  return size;
}

std::string Sized(int64_t bytes) {
  std::ostringstream text;
  text.precision(3);
  if (bytes >= int64_t{1} << 20) {
    text << static_cast<double>(bytes) / (1 << 20) << " MiB";
  } else if (bytes >= 1 << 10) {
    text << static_cast<double>(bytes) / (1 << 10) << " KiB";
  } else {
    text << bytes << " bytes";
  }
  return text.str();
}

const char* Name(Isolation isolation) {
  switch (isolation) {
    case Isolation::kCallSite:
      return "call_site";
    case Isolation::kExecutable:
      return "executable";
    case Isolation::kLane:
      return "lane";
  }
  return "?";
}

}  // namespace

std::string Channel::Name() const {
  std::ostringstream text;
  text << "channel " << id_ << " (" << spec_.program << ", call site " << spec_.site << ")";
  return text.str();
}

int64_t ChannelBytes(int64_t message_bytes, int world_size) {
  return kHeaderBytes + kBuffers * (world_size - 1) * RoundUp(message_bytes, kLineBytes);
}

Lease::~Lease() {
  if (channel_ != nullptr) pool_->Release(*channel_);
}

const Place& Pool::PlaceOf(int ordinal) const {
  for (const Place& place : options_.places) {
    if (place.ordinal == ordinal) return place;
  }
  throw ChannelError("pool '" + options_.name + "': device " + std::to_string(ordinal) +
                     " runs a program that uses the pool, but the pool's mesh does not have it");
}

void Pool::CheckLayout(const std::string& program, int64_t world_size,
                       const std::string& layout) const {
  if (world_size == options_.world_size && layout == options_.layout) return;
  throw ChannelError("program " + program + " was traced for a pool '" + options_.name + "' with " +
                     std::to_string(world_size) + " ranks a group in the layout [" + layout +
                     "], but the pool of that name that is open has " +
                     std::to_string(options_.world_size) + " ranks a group in the layout [" +
                     options_.layout +
                     "]: open the pool over the same axis of the same mesh, or trace again");
}

// A program's call sites are numbered upwards and taken one after another on one thread, so a
// number that does not rise starts the next executable. This is for messages and tables only.
int64_t Pool::ExecutableOf(const ChannelSpec& spec) {
  struct Last {
    const Pool* pool = nullptr;
    std::string program;
    int64_t site = 0;
    int64_t executable = 0;
  };
  thread_local Last last;
  if (last.pool != this || last.program != spec.program || spec.site <= last.site) {
    last.executable = executables_++;
  }
  last.pool = this;
  last.program = spec.program;
  last.site = spec.site;
  return last.executable;
}

int64_t Pool::BytesLocked() const {
  int64_t total = 0;
  for (const auto& [id, entry] : entries_) total += entry.bytes;
  return total;
}

std::string Pool::DroppedLocked() const {
  int64_t count = 0;
  int64_t bytes = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.holders > 0) continue;
    ++count;
    bytes += entry.bytes;
  }
  if (count == 0) return "";
  return std::to_string(count) + " of them (" + Sized(bytes) +
         ") are left by executables that are gone: rollback() to an earlier checkpoint frees "
         "them. ";
}

std::string Pool::WouldFit(const ChannelSpec& spec, int64_t executable) const {
  std::map<int64_t, int64_t> by_executable{{executable, spec.bytes}};
  std::map<std::string, int64_t> by_lane{{spec.lane, spec.bytes}};
  for (const auto& [id, need] : needs_) {
    int64_t& of_executable = by_executable[need.executable];
    of_executable = std::max(of_executable, need.bytes);
    int64_t& of_lane = by_lane[need.lane];
    of_lane = std::max(of_lane, need.bytes);
  }
  int64_t executables = 0;
  for (const auto& [key, bytes] : by_executable) {
    executables += ChannelBytes(bytes, options_.world_size);
  }
  int64_t lanes = 0;
  for (const auto& [key, bytes] : by_lane) {
    lanes += ChannelBytes(SizeClass(bytes), options_.world_size);
  }
  if (options_.isolation == Isolation::kCallSite && executables <= options_.max_bytes) {
    return "isolation='executable' would fit: it needs " + Sized(executables) + " so far";
  }
  if (options_.isolation != Isolation::kLane && lanes <= options_.max_bytes) {
    return "isolation='lane' would fit: it needs " + Sized(lanes) + " so far";
  }
  return "no isolation mode fits; raise max_bytes or lower the cutoff";
}

Lease Pool::Take(const ChannelSpec& asked) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) throw ChannelError(closed_);
  ChannelSpec spec = asked;
  const bool by_lane = options_.isolation == Isolation::kLane;
  // Nothing would keep the program's calls apart on the channel that they share.
  if (by_lane && spec.op != "open_order") {
    throw ChannelError("pool '" + options_.name + "': call site " + std::to_string(spec.site) +
                       " of " + spec.program +
                       " was traced without pool.ordered(), and the pool that is open has "
                       "isolation='lane': open it with isolation='call_site', or trace again");
  }
  if (by_lane) spec.bytes = SizeClass(spec.bytes);
  const int64_t executable = ExecutableOf(spec);

  // A lane's channel has many holders; a dropped channel has none and can go on under a new number.
  auto reuse = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const Entry& entry = it->second;
    const Channel& channel = *entry.channel;
    entry.channel->Check(options_.name);
    if (entry.retired || channel.refused() || channel.capacity() != spec.bytes) continue;
    if (by_lane) {
      if (channel.spec().lane != spec.lane) continue;
      ++it->second.holders;
      return Lease(shared_from_this(), entry.channel);
    }
    if (entry.holders == 0 && channel.memory().reusable() && channel.spec().lane == spec.lane) {
      reuse = it;
    }
  }

  const int64_t id = next_id_;
  const int64_t bytes = ChannelBytes(spec.bytes, options_.world_size);
  std::shared_ptr<ChannelMemory> memory;
  if (reuse != entries_.end()) {
    memory = reuse->second.channel->shared_memory();
    needs_.erase(reuse->first);
    entries_.erase(reuse);
  } else {
    const int64_t held = BytesLocked();
    if (options_.max_bytes > 0 && held + bytes > options_.max_bytes) {
      throw ChannelError("pool '" + options_.name + "': call site " + std::to_string(spec.site) +
                         " of " + spec.program + " needs a channel of " + Sized(bytes) +
                         " a rank; " + std::to_string(entries_.size()) + " channels already take " +
                         Sized(held) + " of max_bytes=" + std::to_string(options_.max_bytes) +
                         " with isolation='" + Name(options_.isolation) + "'. " + DroppedLocked() +
                         WouldFit(spec, executable));
    }
    memory = make_memory_(*this, id, spec);
  }
  ++next_id_;
  auto channel = std::make_shared<Channel>(id, spec, spec.bytes, executable, std::move(memory));
  entries_[id] = Entry{channel, bytes, /*holders=*/1, /*retired=*/false};
  needs_[id] = Need{executable, spec.lane, spec.bytes};
  return Lease(shared_from_this(), std::move(channel));
}

void Pool::Release(const Channel& channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(channel.id());
  // Not there when the pool was closed first.
  if (it != entries_.end()) --it->second.holders;
}

std::shared_ptr<Channel> Pool::Find(int64_t id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : it->second.channel;
}

int64_t Pool::next_id() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_id_;
}

std::vector<ChannelRecord> Pool::Records() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<ChannelRecord> records;
  for (const auto& [id, entry] : entries_) {
    entry.channel->Check(options_.name);
    records.push_back(ChannelRecord{entry.channel, entry.bytes, entry.holders});
  }
  return records;
}

int64_t Pool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return BytesLocked();
}

void Pool::Retire(int64_t first, const std::string& reason, bool forever, bool require_idle) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (require_idle) {
    std::string living;
    int count = 0;
    for (auto it = entries_.lower_bound(first); it != entries_.end(); ++it) {
      if (it->second.holders == 0) continue;
      if (++count <= 3) living += (living.empty() ? "" : ", ") + it->second.channel->Name();
    }
    if (count > 0) {
      throw ChannelError("pool '" + options_.name + "': " + std::to_string(count) +
                         " channel(s) taken since the checkpoint belong to executables that are "
                         "alive: " +
                         living + (count > 3 ? ", ..." : "") +
                         ". Drop the compiled functions first (`del f`, `f.clear_cache()`)");
    }
  }
  for (auto it = entries_.lower_bound(first); it != entries_.end(); ++it) {
    it->second.retired = true;
    it->second.channel->Retire(reason);
  }
  if (forever && closed_.empty()) closed_ = reason;
}

void Pool::Forget(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.erase(id);
  needs_.erase(id);
}

PoolRegistry& PoolRegistry::Get() {
  // Never destroyed: executables may be dropped while the process exits.
  static PoolRegistry* const registry = std::make_unique<PoolRegistry>().release();
  return *registry;
}

std::shared_ptr<Pool> PoolRegistry::Open(PoolOptions options, Pool::MakeMemory make_memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Pool>& slot = pools_[options.name];
  if (slot != nullptr) {
    throw ChannelError("a pool named '" + options.name +
                       "' is open already; close it or give this one another name");
  }
  slot = std::make_shared<Pool>(std::move(options), std::move(make_memory));
  return slot;
}

std::shared_ptr<Pool> PoolRegistry::Find(const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = pools_.find(name);
  if (it != pools_.end()) return it->second;
  std::string open;
  for (const auto& [other, pool] : pools_) open += (open.empty() ? "'" : ", '") + other + "'";
  throw ChannelError(
      "this program was compiled for the channel pool '" + name +
      "', which is not open in this process (open: " + (open.empty() ? "none" : open) +
      "); open it before the program is loaded or compiled: "
      "jax_b12x.comm.ChannelPool(mesh, axis, name='" +
      name + "'), or a DcpPool for dcp_ calls; a pool with transport='xla' has no channels for it");
}

void PoolRegistry::Remove(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  pools_.erase(name);
}

}  // namespace b12x::runtime
