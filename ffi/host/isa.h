// Which instruction sets the CPU kernels were built for, and which one runs here.
#ifndef JAX_B12X_FFI_HOST_ISA_H_
#define JAX_B12X_FFI_HOST_ISA_H_

#include <optional>
#include <string_view>
#include <vector>

namespace b12x::host {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The names that B12X_HOST_ISA and the `isa` attribute use.
const char* IsaName(Isa isa);

// The sets that were built and that this processor and operating system have, narrowest first.
std::vector<Isa> UsableIsas();

// The set called `name`, the widest usable one for "auto"; nothing if it is not usable here.
std::optional<Isa> FindIsa(std::string_view name);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_ISA_H_
