// Every handler family, one line each. A family is defined in the .cc file of the same name.
#ifndef JAX_B12X_FFI_HANDLERS_FAMILIES_H_
#define JAX_B12X_FFI_HANDLERS_FAMILIES_H_

#include "ffi/registry.h"

namespace b12x::ffi {

void RegisterCommCpu(Registry& registry);
void RegisterCommCuda(Registry& registry);
void RegisterDcpCpu(Registry& registry);
void RegisterDcpCuda(Registry& registry);
void RegisterDenseMlpCpu(Registry& registry);
void RegisterDenseMlpCuda(Registry& registry);
void RegisterMoeBlockCpu(Registry& registry);
void RegisterMoeBlockCuda(Registry& registry);
void RegisterMoeCpu(Registry& registry);
void RegisterMoeCuda(Registry& registry);
void RegisterReadBandwidthCuda(Registry& registry);
void RegisterRouterCpu(Registry& registry);
void RegisterRouterCuda(Registry& registry);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_FAMILIES_H_
