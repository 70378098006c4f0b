#include "ffi/host/isa.h"

namespace b12x::host {
namespace {

#if defined(__x86_64__)
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

std::vector<Isa> UsableIsas() {
  std::vector<Isa> isas = {Isa::kBaseline};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (HasAvx2()) isas.push_back(Isa::kAvx2);
  if (HasAvx512()) isas.push_back(Isa::kAvx512);
#endif
  return isas;
}

std::optional<Isa> FindIsa(std::string_view name) {
  const std::vector<Isa> isas = UsableIsas();
  if (name == "auto") return isas.back();
  for (const Isa isa : isas) {
    if (name == IsaName(isa)) return isa;
  }
  return std::nullopt;
}

}  // namespace b12x::host
