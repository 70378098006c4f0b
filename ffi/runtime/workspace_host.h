// The part of a workspace that is on a CPU device: nothing but its existence. The host kernels keep
// nothing from one execution to the next; leases, lanes, limits and bytes are counted just as they
// are on a GPU.
#ifndef JAX_B12X_FFI_RUNTIME_WORKSPACE_HOST_H_
#define JAX_B12X_FFI_RUNTIME_WORKSPACE_HOST_H_

#include <memory>

#include "ffi/runtime/workspace.h"

namespace b12x::runtime {

class HostWorkspace : public DeviceWorkspace {
 public:
  void Quiesce() override {}
  void Reset(void*) override {}
};

inline std::unique_ptr<DeviceWorkspace> MakeHostWorkspace(const WorkspacePoolOptions&,
                                                          const WorkspaceSpec&, int, void*) {
  return std::make_unique<HostWorkspace>();
}

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_WORKSPACE_HOST_H_
