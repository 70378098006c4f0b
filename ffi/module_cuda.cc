// `jax_b12x._b12x_cuda`: the CUDA extension. It offers the FFI handlers of the `CUDA` platform to
// `_native.py`, and can be imported where there is no GPU and no driver.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cuda/launch/moe_decode.h"
#include "ffi/bindings/launch_log.h"
#include "ffi/bindings/pool.h"
#include "ffi/bindings/workspace.h"
#include "ffi/handlers/families.h"
#include "ffi/registry.h"
#include "ffi/runtime/peer_memory.h"
#include "ffi/runtime/workspace_cuda.h"

namespace nb = nanobind;

namespace {

void Fill(b12x::ffi::Registry& registry) {
  b12x::ffi::RegisterCommCuda(registry);
  b12x::ffi::RegisterDcpCuda(registry);
  b12x::ffi::RegisterDenseMlpCuda(registry);
  b12x::ffi::RegisterMoeBlockCuda(registry);
  b12x::ffi::RegisterMoeCuda(registry);
  b12x::ffi::RegisterReadBandwidthCuda(registry);
  b12x::ffi::RegisterRouterCuda(registry);
}

}  // namespace

NB_MODULE(_b12x_cuda, m) {
  m.doc() = "CUDA kernels of jax_b12x as XLA FFI handlers.";
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  b12x::ffi::ExportRegistry(m, &Fill);
  b12x::ffi::ExportPools(m, &b12x::runtime::MakePeerMemory);
  b12x::ffi::ExportLaunchLog(m);
  b12x::ffi::ExportWorkspaces(m, &b12x::runtime::MakeCudaWorkspace);
  m.def("peer_obstacle", &b12x::runtime::PeerObstacle, nb::arg("ordinals"));
  m.def(
      "moe_decode_bytes",
      [](int num_tokens, int top_k, int hidden, int intermediate, bool quantized, int grid,
         int stages, int fc1_split, int fc2_split, int fc2_order) {
        const b12x::MoeDecodeGeometry geometry{grid, stages, fc1_split, fc2_split,
                                               static_cast<b12x::Fc2Order>(fc2_order)};
        const int64_t scratch =
            b12x::moe_decode_scratch(num_tokens, top_k, hidden, intermediate, quantized, geometry)
                .bytes();
        const int shared =
            b12x::PlanOf(num_tokens < b12x::kMoeMaxTokens ? num_tokens : b12x::kMoeMaxTokens, top_k,
                         hidden, intermediate, quantized, geometry)
                .shared.bytes;
        return nb::make_tuple(scratch, shared);
      },
      nb::arg("num_tokens"), nb::arg("top_k"), nb::arg("hidden"), nb::arg("intermediate"),
      nb::arg("quantized"), nb::arg("grid"), nb::arg("stages"), nb::arg("fc1_split"),
      nb::arg("fc2_split"), nb::arg("fc2_order"),
      "Returns the scratch and the shared memory, in bytes, that a launch needs.");
}
