// `b12x_read_bandwidth` on the `CUDA` platform: reads a buffer and does nothing else, for
// benchmarks.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/kernels/read_bandwidth.h"
#include "ffi/handlers/families.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error ReadBandwidth(cudaStream_t stream, xffi::Buffer<xffi::U8> data,
                          xffi::ResultBuffer<xffi::U32> sink) {
  if (sink->element_count() < 1 || data.element_count() % 16 != 0) {
    return xffi::Error::InvalidArgument(
        "b12x_read_bandwidth: data must be a multiple of 16 bytes, and the result one word");
  }
  const cudaError_t error = launch_read_bandwidth(
      data.typed_data(), static_cast<int64_t>(data.element_count()), sink->typed_data(), stream);
  if (error != cudaSuccess) {
    return xffi::Error::Internal(std::string("b12x_read_bandwidth: ") + cudaGetErrorString(error));
  }
  return xffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kReadBandwidth, ReadBandwidth,
                       xffi::Ffi::Bind()
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Arg<xffi::Buffer<xffi::U8>>()
                           .Ret<xffi::Buffer<xffi::U32>>(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterReadBandwidthCuda(Registry& registry) {
  Stages stages;
  stages.execute = kReadBandwidth;
  registry.AddTarget("b12x_read_bandwidth", stages);
}

}  // namespace b12x::ffi
