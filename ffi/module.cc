// `jax_b12x._b12x`: the host extension. It offers the FFI handlers of the `cpu` platform to
// `_native.py`.
#include <nanobind/nanobind.h>

#include "ffi/bindings/pool.h"
#include "ffi/handlers/families.h"
#include "ffi/host/isa.h"
#include "ffi/registry.h"
#include "ffi/runtime/meeting.h"

namespace nb = nanobind;

namespace {

void Fill(b12x::ffi::Registry& registry) {
  b12x::ffi::RegisterMoeCpu(registry);
  b12x::ffi::RegisterCommCpu(registry);
}

}  // namespace

NB_MODULE(_b12x, m) {
  m.doc() = "CPU kernels of jax_b12x as XLA FFI handlers.";
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  b12x::ffi::ExportRegistry(m, &Fill);
  b12x::ffi::ExportPools(m, &b12x::runtime::MakeMeetingPlaces);
  m.def("host_isas", []() {
    nb::list names;
    for (const b12x::host::Isa isa : b12x::host::UsableIsas()) {
      names.append(b12x::host::IsaName(isa));
    }
    return names;
  });
}
