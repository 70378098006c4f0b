// `b12x_dense_mlp` on the `CUDA` platform: decodes and checks a call, launches.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "cuda/launch/dense_mlp.h"
#include "ffi/handlers/dense_mlp_call.h"
#include "ffi/handlers/families.h"
#include "ffi/handlers/launched.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error DenseMlpCuda(cudaStream_t stream, xffi::AnyBuffer x, xffi::AnyBuffer w13,
                         xffi::AnyBuffer w2, xffi::AnyBuffer w13_bias, xffi::AnyBuffer w2_bias,
                         xffi::AnyBuffer shared_gate, xffi::Result<xffi::AnyBuffer> out,
                         xffi::ResultBuffer<xffi::U8> scratch, std::string_view activation,
                         float alpha, float limit) {
  DenseMlpBuffers buffers{x, w13, w2, w13_bias, w2_bias, shared_gate, out};
  if (x.element_type() != xffi::DataType::BF16 && x.element_type() != xffi::DataType::F16) {
    return xffi::Error::InvalidArgument("b12x_dense_mlp on CUDA: x must be bfloat16 or float16");
  }
  DenseMlpParams params;
  params.fp16 = x.element_type() == xffi::DataType::F16;
  params.alpha = alpha;
  params.limit = limit;
  xffi::Error error = ReadActivation(activation, &params.activation);
  if (error.success()) error = ReadDenseMlpBuffers(buffers, &params);
  if (error.failure()) return error;
  return Launched(launch_dense_mlp(params, scratch->typed_data(),
                                   static_cast<int64_t>(scratch->size_bytes()), stream),
                  "b12x_dense_mlp on CUDA");
}

XLA_FFI_DEFINE_HANDLER(kDenseMlpCuda, DenseMlpCuda,
                       BindDenseMlp(xffi::Ffi::Bind().Ctx<xffi::PlatformStream<cudaStream_t>>()),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterDenseMlpCuda(Registry& registry) {
  Stages stages;
  stages.execute = kDenseMlpCuda;
  registry.AddTarget("b12x_dense_mlp", stages);
}

}  // namespace b12x::ffi
