// `b12x_dense_mlp` on the `cpu` platform: decodes and checks a call, runs the host code.
#include <cstdint>
#include <string_view>

#include "ffi/handlers/dense_mlp_call.h"
#include "ffi/handlers/families.h"
#include "ffi/handlers/host_executor.h"
#include "ffi/host/dense_mlp.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error ReadDtype(xffi::DataType from, host::Dtype* to) {
  switch (from) {
    case xffi::DataType::F32:
      *to = host::Dtype::kF32;
      return xffi::Error::Success();
    case xffi::DataType::BF16:
      *to = host::Dtype::kBf16;
      return xffi::Error::Success();
    case xffi::DataType::F16:
      *to = host::Dtype::kF16;
      return xffi::Error::Success();
    default:
      return xffi::Error::InvalidArgument(
          "b12x_dense_mlp on cpu: x must be float32, bfloat16 or float16");
  }
}

xffi::Error DenseMlpCpu(xffi::ThreadPool pool, xffi::AnyBuffer x, xffi::AnyBuffer w13,
                        xffi::AnyBuffer w2, xffi::AnyBuffer w13_bias, xffi::AnyBuffer w2_bias,
                        xffi::AnyBuffer shared_gate, xffi::Result<xffi::AnyBuffer> out,
                        xffi::ResultBuffer<xffi::U8> scratch, std::string_view activation,
                        float alpha, float limit) {
  DenseMlpBuffers buffers{x, w13, w2, w13_bias, w2_bias, shared_gate, out};
  host::DenseMlpProblem problem;
  problem.activation.alpha = alpha;
  problem.activation.limit = limit;
  xffi::Error error = ReadDtype(x.element_type(), &problem.dtype);
  if (error.success()) error = ReadActivation(activation, &problem.activation.kind);
  if (error.success()) error = ReadDenseMlpBuffers(buffers, &problem);
  if (error.failure()) return error;
  problem.scratch = scratch->typed_data();
  if (static_cast<int64_t>(scratch->size_bytes()) < host::DenseMlpScratchBytes(problem)) {
    return xffi::Error::InvalidArgument("b12x_dense_mlp on cpu: scratch is too small");
  }
  host::RunDenseMlp(problem, ExecutorOf(pool));
  return xffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kDenseMlpCpu, DenseMlpCpu,
                       BindDenseMlp(xffi::Ffi::Bind().Ctx<xffi::ThreadPool>()));

}  // namespace

void RegisterDenseMlpCpu(Registry& registry) {
  Stages stages;
  stages.execute = kDenseMlpCpu;
  registry.AddTarget("b12x_dense_mlp", stages);
}

}  // namespace b12x::ffi
