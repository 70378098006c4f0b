// Workspaces: what a call site keeps on a device from one execution to the next, such as the words
// of a grid barrier, or a stream of its own. Leased like channels, by the call site of an
// executable; unlike channels, no other device knows of them.
#ifndef JAX_B12X_FFI_RUNTIME_WORKSPACE_H_
#define JAX_B12X_FFI_RUNTIME_WORKSPACE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace b12x::runtime {

// Everything that workspaces refuse, in words for the user.
class WorkspaceError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a call site asks for.
struct WorkspaceSpec {
  std::string op;
  std::string program;      // the name of the program that the call site is in
  int64_t site = 0;         // the call site's number in its program
  std::string lane;         // the lane it was traced in
  int64_t bytes = 0;        // persistent memory, zero at first
  bool aux_stream = false;  // whether it submits work to a stream of its own

  // "call site 3 of jit_step (moe)"
  std::string Name() const;
};

// The part of a workspace that is on one device. Made outside capture, before the first execution.
class DeviceWorkspace {
 public:
  virtual ~DeviceWorkspace() = default;
  // Returns when no execution in flight uses it.
  virtual void Quiesce() = 0;
  // Whether the device has reported a fault since the last reset. Cheap, and without a wait.
  virtual bool faulty() const { return false; }
  // What it reported, for a person.
  virtual std::string Fault() const { return ""; }
  // Makes it as it was at first, for the executions that follow on the device's stream. No wait.
  virtual void Reset(void* stream) = 0;
};

struct WorkspacePoolOptions;
using MakeDeviceWorkspace = std::function<std::unique_ptr<DeviceWorkspace>(
    const WorkspacePoolOptions& pool, const WorkspaceSpec& spec, int ordinal, void* stream)>;

// Who shares a workspace.
enum class WorkspaceIsolation {
  kCallSite,  // nobody
  kLane,      // programs of one lane that have different names; two call sites of one never do
};

struct WorkspacePoolOptions {
  std::string name;
  WorkspaceIsolation isolation = WorkspaceIsolation::kCallSite;
  std::vector<std::string> lanes;  // the only lanes there are; empty for any
  int64_t max_bytes = 0;           // on one device; 0 for no limit
  int64_t timeout_ms = 10'000;     // that a block of a resident grid waits for the others
};

class Workspace {
 public:
  static constexpr int kMaxDevices = 64;  // of one process

  Workspace(int64_t id, WorkspaceSpec spec, int64_t executable)
      : id_(id), spec_(std::move(spec)), executable_(executable) {}

  int64_t id() const { return id_; }
  // What its first call site asked for.
  const WorkspaceSpec& spec() const { return spec_; }
  int64_t executable() const { return executable_; }

  // Null where the device has no part of it yet. Takes no time.
  DeviceWorkspace* On(int ordinal) const {
    return ordinal < 0 || ordinal >= kMaxDevices
               ? nullptr
               : devices_[ordinal].load(std::memory_order_acquire);
  }
  std::vector<int> Devices() const;

 private:
  friend class WorkspacePool;
  using Parts = std::map<int, std::unique_ptr<DeviceWorkspace>>;

  const int64_t id_;
  const WorkspaceSpec spec_;
  const int64_t executable_;
  // Held while the host waits for a device, when nobody may hold the pool's mutex: whoever drops an
  // executable takes that one, and may hold Python's lock, which the device's work may wait for.
  mutable std::mutex mutex_;
  Parts parts_;
  std::string refusal_;  // why it may not be used any more
  int64_t faults_ = 0;
  std::set<int>
      told_;  // devices whose fault somebody has been told of, and which are not reset yet
  // What executions look at.
  std::array<std::atomic<DeviceWorkspace*>, kMaxDevices> devices_{};
};

class WorkspacePool;

// The hold that a compiled call site has on a workspace. It ends with the executable.
class WorkspaceLease {
 public:
  WorkspaceLease(std::shared_ptr<WorkspacePool> pool, std::shared_ptr<Workspace> workspace,
                 WorkspaceSpec spec)
      : pool_(std::move(pool)), workspace_(std::move(workspace)), spec_(std::move(spec)) {}
  WorkspaceLease(WorkspaceLease&&) = default;
  WorkspaceLease& operator=(WorkspaceLease&&) = delete;
  ~WorkspaceLease();

  // Makes the device's part the first time; afterwards a check that takes constant time. When an
  // execution on the device has reported a fault it resets the part, and throws unless somebody has
  // been told of it. `stream` is what executions run on, null where there is no such thing.
  void Prepare(int ordinal, void* stream);
  // The device's part; throws when `Prepare` has not made it.
  DeviceWorkspace& On(int ordinal) const;

 private:
  std::shared_ptr<WorkspacePool> pool_;
  std::shared_ptr<Workspace> workspace_;
  WorkspaceSpec spec_;
};

// What `describe()` and the teardown see of a workspace.
struct WorkspaceRecord {
  std::shared_ptr<const Workspace> workspace;
  int holders = 0;
  std::vector<int> devices;
  std::string refusal;
  int64_t faults = 0;
};

class WorkspacePool : public std::enable_shared_from_this<WorkspacePool> {
 public:
  WorkspacePool(WorkspacePoolOptions options, MakeDeviceWorkspace make)
      : options_(std::move(options)), make_(std::move(make)) {}

  const WorkspacePoolOptions& options() const { return options_; }

  WorkspaceLease Take(const WorkspaceSpec& spec);

  // While locked, whatever needs memory that is not there yet is refused.
  void Lock(bool locked) { locked_.store(locked); }
  bool locked() const { return locked_.load(); }

  // Workspaces taken from now on have this number or a higher one.
  int64_t next_id() const;
  int64_t bytes() const;
  std::vector<WorkspaceRecord> Records() const;
  // Each fault that a device has reported and nobody has been told of.
  std::vector<std::string> TakeFaults();

  // From now on the workspaces numbered `first` and higher are refused with `reason`, and, where
  // `forever` is set, every new lease as well. Throws, and changes nothing, when `require_idle` is
  // set and an executable holds one of them.
  void Retire(int64_t first, const std::string& reason, bool forever, bool require_idle);
  void Quiesce(int64_t id);
  // Frees a retired workspace and forgets it.
  void Free(int64_t id);

 private:
  friend class WorkspaceLease;
  struct Entry {
    std::shared_ptr<Workspace> workspace;
    std::multiset<std::string> holders;  // the names of their programs
  };

  void Prepare(Workspace& workspace, const WorkspaceSpec& spec, int ordinal, void* stream);
  void Release(const Workspace& workspace, const WorkspaceSpec& spec);
  bool Shareable(const Entry& entry, const WorkspaceSpec& spec) const;
  int64_t ExecutableOf(const WorkspaceSpec& spec);
  int64_t BytesLocked() const;
  std::vector<std::shared_ptr<Workspace>> All() const;
  std::string FaultText(Workspace& workspace, const WorkspaceSpec& spec, int ordinal,
                        const std::string& fault);
  [[noreturn]] void RefuseGrowth(const WorkspaceSpec& spec, const std::string& where) const;

  const WorkspacePoolOptions options_;
  const MakeDeviceWorkspace make_;
  mutable std::mutex mutex_;
  std::map<int64_t, Entry> entries_;
  int64_t next_id_ = 0;
  int64_t executables_ = 0;
  std::atomic<bool> locked_{false};
  std::string closed_;
};

// The workspace pools of this process, by name. The one named "default" is always there.
class WorkspaceRegistry {
 public:
  static WorkspaceRegistry& Get();

  // How parts are made on this extension's devices; called when the extension is loaded.
  void SetMaker(MakeDeviceWorkspace make);

  // Throws when a pool of that name is open.
  std::shared_ptr<WorkspacePool> Open(WorkspacePoolOptions options);
  // Throws an error that says how to open it when there is none.
  std::shared_ptr<WorkspacePool> Find(const std::string& name);
  void Remove(const std::string& name);

 private:
  std::mutex mutex_;
  MakeDeviceWorkspace make_;
  std::map<std::string, std::shared_ptr<WorkspacePool>> pools_;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_WORKSPACE_H_
