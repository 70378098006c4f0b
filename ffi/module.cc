// `jax_b12x._b12x`: the host extension. It offers the FFI handlers of the `cpu` platform to
// `_native.py`.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "cuda/comm/dcp_layout.h"
#include "ffi/bindings/launch_log.h"
#include "ffi/bindings/pool.h"
#include "ffi/bindings/workspace.h"
#include "ffi/handlers/families.h"
#include "ffi/host/isa.h"
#include "ffi/registry.h"
#include "ffi/runtime/meeting.h"
#include "ffi/runtime/workspace_host.h"

namespace nb = nanobind;

namespace {

void Fill(b12x::ffi::Registry& registry) {
  b12x::ffi::RegisterMoeBlockCpu(registry);
  b12x::ffi::RegisterMoeCpu(registry);
  b12x::ffi::RegisterCommCpu(registry);
  b12x::ffi::RegisterDcpCpu(registry);
  b12x::ffi::RegisterDenseMlpCpu(registry);
  b12x::ffi::RegisterRouterCpu(registry);
}

}  // namespace

NB_MODULE(_b12x, m) {
  m.doc() = "CPU kernels of jax_b12x as XLA FFI handlers.";
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  b12x::ffi::ExportRegistry(m, &Fill);
  b12x::ffi::ExportPools(m, &b12x::runtime::MakeMeetingPlaces);
  b12x::ffi::ExportLaunchLog(m);
  b12x::ffi::ExportWorkspaces(m, &b12x::runtime::MakeHostWorkspace);
  // What the kernels compute of a combine's places, for tests at sizes that no machine here holds.
  m.def(
      "dcp_places",
      [](int64_t outer, int64_t inner, int world_size, int64_t head_dim, int64_t element_bytes,
         int64_t row, int rank) {
        const b12x::comm::HeadRows rows{outer, inner, world_size};
        const int64_t parts = rows.count() * b12x::comm::CombineParts(head_dim, element_bytes);
        return nb::make_tuple(rows.InWhole(row, rank),
                              b12x::comm::CombineRowsOffset(parts) + row * head_dim * element_bytes,
                              b12x::comm::CombineSlotBytes(rows, head_dim, element_bytes));
      },
      nb::arg("outer"), nb::arg("inner"), nb::arg("world_size"), nb::arg("head_dim"),
      nb::arg("element_bytes"), nb::arg("row"), nb::arg("rank"));
  m.def("host_isas", []() {
    nb::list names;
    for (const b12x::host::Isa isa : b12x::host::UsableIsas()) {
      names.append(b12x::host::IsaName(isa));
    }
    return names;
  });
}
