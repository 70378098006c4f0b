#include "ffi/runtime/workspace.h"

#include <algorithm>
#include <utility>

namespace b12x::runtime {
namespace {

constexpr char kDefaultPool[] = "default";

std::string Quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text.empty() ? "none" : text;
}

}  // namespace

std::string WorkspaceSpec::Name() const {
  return "call site " + std::to_string(site) + " of " + program + " (" + op + ")";
}

std::vector<int> Workspace::Devices() const {
  std::vector<int> devices;
  for (int ordinal = 0; ordinal < kMaxDevices; ++ordinal) {
    if (On(ordinal) != nullptr) devices.push_back(ordinal);
  }
  return devices;
}

WorkspaceLease::~WorkspaceLease() {
  if (workspace_ != nullptr) pool_->Release(*workspace_, spec_);
}

void WorkspaceLease::Prepare(int ordinal, void* stream) {
  const DeviceWorkspace* part = workspace_->On(ordinal);
  if (part == nullptr || part->faulty()) pool_->Prepare(*workspace_, spec_, ordinal, stream);
}

DeviceWorkspace& WorkspaceLease::On(int ordinal) const {
  DeviceWorkspace* part = workspace_->On(ordinal);
  if (part == nullptr) {
    throw WorkspaceError("workspace pool '" + pool_->options().name + "': " + spec_.Name() +
                         " runs on device " + std::to_string(ordinal) +
                         ", where it has no workspace");
  }
  return *part;
}

// A program's call sites are numbered upwards and taken one after another on one thread, so a
// number that does not rise starts the next executable. This is for messages and tables only.
int64_t WorkspacePool::ExecutableOf(const WorkspaceSpec& spec) {
  struct Last {
    const WorkspacePool* pool = nullptr;
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

int64_t WorkspacePool::BytesLocked() const {
  int64_t total = 0;
  for (const auto& [id, entry] : entries_) total += entry.workspace->spec().bytes;
  return total;
}

void WorkspacePool::RefuseGrowth(const WorkspaceSpec& spec, const std::string& where) const {
  throw WorkspaceError("workspace pool '" + options_.name + "' is locked: " + spec.Name() +
                       ", lane '" + spec.lane + "', needs " + std::to_string(spec.bytes) +
                       " bytes more" + where + "; compile and run it before lock(), or unlock()");
}

bool WorkspacePool::Shareable(const Entry& entry, const WorkspaceSpec& spec) const {
  const WorkspaceSpec& own = entry.workspace->spec();
  std::lock_guard<std::mutex> lock(entry.workspace->mutex_);
  if (!entry.workspace->refusal_.empty() || own.lane != spec.lane || own.bytes != spec.bytes ||
      own.aux_stream != spec.aux_stream) {
    return false;
  }
  if (entry.holders.empty()) return true;
  // A program of another name is another executable, which the lane's owner does not run at the
  // same time; call sites of one executable may be branches of one graph.
  return options_.isolation == WorkspaceIsolation::kLane && entry.holders.count(spec.program) == 0;
}

WorkspaceLease WorkspacePool::Take(const WorkspaceSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) throw WorkspaceError(closed_);
  const std::vector<std::string>& lanes = options_.lanes;
  if (!lanes.empty() && std::find(lanes.begin(), lanes.end(), spec.lane) == lanes.end()) {
    throw WorkspaceError("workspace pool '" + options_.name + "': " + spec.Name() +
                         " is in the lane '" + spec.lane + "'; the pool's lanes are " +
                         Quoted(lanes));
  }
  const int64_t executable = ExecutableOf(spec);
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (!Shareable(it->second, spec)) continue;
    if (!it->second.holders.empty()) {
      it->second.holders.insert(spec.program);
      return WorkspaceLease(shared_from_this(), it->second.workspace, spec);
    }
    // Nobody's: it goes on under a new number, with its words as they are: they count for ever.
    auto workspace = std::make_shared<Workspace>(next_id_, spec, executable);
    {
      std::lock_guard<std::mutex> old(it->second.workspace->mutex_);
      workspace->parts_ = std::move(it->second.workspace->parts_);
    }
    entries_.erase(it);
    entries_[next_id_++] = Entry{workspace, {spec.program}};
    return WorkspaceLease(shared_from_this(), std::move(workspace), spec);
  }
  if (locked_) RefuseGrowth(spec, "");
  const int64_t held = BytesLocked();
  if (options_.max_bytes > 0 && held + spec.bytes > options_.max_bytes) {
    throw WorkspaceError("workspace pool '" + options_.name + "': " + spec.Name() + " needs " +
                         std::to_string(spec.bytes) + " bytes a device; " +
                         std::to_string(entries_.size()) + " workspaces already take " +
                         std::to_string(held) +
                         " of max_bytes=" + std::to_string(options_.max_bytes));
  }
  auto workspace = std::make_shared<Workspace>(next_id_, spec, executable);
  entries_[next_id_++] = Entry{workspace, {spec.program}};
  return WorkspaceLease(shared_from_this(), std::move(workspace), spec);
}

void WorkspacePool::Release(const Workspace& workspace, const WorkspaceSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(workspace.id());
  if (it == entries_.end()) return;  // the pool was closed first
  const auto holder = it->second.holders.find(spec.program);
  if (holder != it->second.holders.end()) it->second.holders.erase(holder);
}

std::string WorkspacePool::FaultText(Workspace& workspace, const WorkspaceSpec& spec, int ordinal,
                                     const std::string& fault) {
  ++workspace.faults_;
  return "workspace pool '" + options_.name + "', workspace " + std::to_string(workspace.id()) +
         ", " + spec.Name() + ", device " + std::to_string(ordinal) + ": " + fault +
         " within the timeout of " + std::to_string(options_.timeout_ms) +
         " ms; the results of that run are NaN. The program can be run again";
}

void WorkspacePool::Prepare(Workspace& workspace, const WorkspaceSpec& spec, int ordinal,
                            void* stream) {
  std::lock_guard<std::mutex> lock(workspace.mutex_);
  if (!workspace.refusal_.empty()) throw WorkspaceError(workspace.refusal_);
  if (ordinal < 0 || ordinal >= Workspace::kMaxDevices) {
    throw WorkspaceError("device " + std::to_string(ordinal) +
                         " is outside the 64 that a process may use");
  }
  const auto found = workspace.parts_.find(ordinal);
  const bool here = found != workspace.parts_.end();
  const bool ours = workspace.On(ordinal) != nullptr;
  if (here && found->second->faulty()) {
    const std::string fault = found->second->Fault();
    found->second->Reset(stream);
    // What an executable that is gone did is nobody's any more.
    const bool told = workspace.told_.erase(ordinal) > 0 || !ours;
    if (!told) throw WorkspaceError(FaultText(workspace, spec, ordinal, fault));
  }
  if (ours) return;
  DeviceWorkspace* part = nullptr;
  if (here) {
    part = found->second.get();
  } else {
    if (locked_) RefuseGrowth(spec, " on device " + std::to_string(ordinal));
    part = (workspace.parts_[ordinal] = make_(options_, workspace.spec_, ordinal, stream)).get();
  }
  workspace.devices_[ordinal].store(part, std::memory_order_release);
}

int64_t WorkspacePool::next_id() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_id_;
}

int64_t WorkspacePool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return BytesLocked();
}

std::vector<WorkspaceRecord> WorkspacePool::Records() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<WorkspaceRecord> records;
  for (const auto& [id, entry] : entries_) {
    const Workspace& workspace = *entry.workspace;
    std::lock_guard<std::mutex> parts(workspace.mutex_);
    records.push_back({entry.workspace, static_cast<int>(entry.holders.size()), workspace.Devices(),
                       workspace.refusal_, workspace.faults_});
  }
  return records;
}

std::vector<std::shared_ptr<Workspace>> WorkspacePool::All() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Workspace>> all;
  for (const auto& [id, entry] : entries_) all.push_back(entry.workspace);
  return all;
}

std::vector<std::string> WorkspacePool::TakeFaults() {
  std::vector<std::string> faults;
  for (const std::shared_ptr<Workspace>& workspace : All()) {
    std::lock_guard<std::mutex> lock(workspace->mutex_);
    for (const auto& [ordinal, part] : workspace->parts_) {
      if (!part->faulty() || !workspace->told_.insert(ordinal).second) continue;
      faults.push_back(FaultText(*workspace, workspace->spec(), ordinal, part->Fault()));
    }
  }
  return faults;
}

void WorkspacePool::Retire(int64_t first, const std::string& reason, bool forever,
                           bool require_idle) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (require_idle) {
    std::string living;
    int count = 0;
    for (auto it = entries_.lower_bound(first); it != entries_.end(); ++it) {
      if (it->second.holders.empty()) continue;
      if (++count <= 3)
        living += (living.empty() ? "" : ", ") + it->second.workspace->spec().Name();
    }
    if (count > 0) {
      throw WorkspaceError("workspace pool '" + options_.name + "': " + std::to_string(count) +
                           " workspace(s) taken since the checkpoint belong to executables that "
                           "are alive: " +
                           living + (count > 3 ? ", ..." : ""));
    }
  }
  for (auto it = entries_.lower_bound(first); it != entries_.end(); ++it) {
    Workspace& workspace = *it->second.workspace;
    std::lock_guard<std::mutex> parts(workspace.mutex_);
    if (workspace.refusal_.empty()) workspace.refusal_ = reason;
    // Executions look here: from now on they come to Prepare, which refuses.
    for (auto& device : workspace.devices_) device.store(nullptr, std::memory_order_release);
  }
  if (forever && closed_.empty()) closed_ = reason;
}

void WorkspacePool::Quiesce(int64_t id) {
  for (const std::shared_ptr<Workspace>& workspace : All()) {
    if (workspace->id() != id) continue;
    std::lock_guard<std::mutex> lock(workspace->mutex_);
    for (const auto& [ordinal, part] : workspace->parts_) part->Quiesce();
  }
}

void WorkspacePool::Free(int64_t id) {
  Workspace::Parts parts;  // freed outside the locks
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end()) return;
  {
    std::lock_guard<std::mutex> part_lock(it->second.workspace->mutex_);
    parts = std::move(it->second.workspace->parts_);
  }
  entries_.erase(it);
}

WorkspaceRegistry& WorkspaceRegistry::Get() {
  // Never destroyed: executables may be dropped while the process exits.
  static WorkspaceRegistry* const registry = std::make_unique<WorkspaceRegistry>().release();
  return *registry;
}

void WorkspaceRegistry::SetMaker(MakeDeviceWorkspace make) {
  std::lock_guard<std::mutex> lock(mutex_);
  make_ = std::move(make);
  WorkspacePoolOptions options;
  options.name = kDefaultPool;
  pools_[kDefaultPool] = std::make_shared<WorkspacePool>(std::move(options), make_);
}

std::shared_ptr<WorkspacePool> WorkspaceRegistry::Open(WorkspacePoolOptions options) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<WorkspacePool>& slot = pools_[options.name];
  if (slot != nullptr) {
    throw WorkspaceError("a workspace pool named '" + options.name +
                         "' is open already; close it or give this one another name");
  }
  slot = std::make_shared<WorkspacePool>(std::move(options), make_);
  return slot;
}

std::shared_ptr<WorkspacePool> WorkspaceRegistry::Find(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = pools_.find(name);
  if (it != pools_.end()) return it->second;
  std::vector<std::string> open;
  for (const auto& [other, pool] : pools_) open.push_back(other);
  throw WorkspaceError("this program was compiled for the workspace pool '" + name +
                       "', which is not open in this process (open: " + Quoted(open) +
                       "); open it before the program is loaded or compiled: "
                       "jax_b12x.workspace.WorkspacePool(name='" +
                       name + "')");
}

void WorkspaceRegistry::Remove(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  pools_.erase(name);
}

}  // namespace b12x::runtime
