// `jax_b12x._b12x_cuda`: the CUDA extension. It offers the FFI handlers of the `CUDA` platform to
// `_native.py`, and can be imported where there is no GPU and no driver.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ffi/bindings/pool.h"
#include "ffi/handlers/families.h"
#include "ffi/registry.h"
#include "ffi/runtime/peer_memory.h"

namespace nb = nanobind;

namespace {

void Fill(b12x::ffi::Registry& registry) { b12x::ffi::RegisterCommCuda(registry); }

}  // namespace

NB_MODULE(_b12x_cuda, m) {
  m.doc() = "CUDA kernels of jax_b12x as XLA FFI handlers.";
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  b12x::ffi::ExportRegistry(m, &Fill);
  b12x::ffi::ExportPools(m, &b12x::runtime::MakePeerMemory);
  m.def("peer_obstacle", &b12x::runtime::PeerObstacle, nb::arg("ordinals"));
}
