// `b12x_moe` on the `cpu` platform: decodes operands and attributes, checks them, runs the host
// kernels.
#include "ffi/handlers/families.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error MoeCpu(xffi::RemainingArgs, xffi::RemainingRets, xffi::Dictionary) {
  return xffi::Error(xffi::ErrorCode::kUnimplemented, "b12x_moe has no CPU kernels yet");
}

XLA_FFI_DEFINE_HANDLER(kMoeCpu, MoeCpu, xffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace

void RegisterMoeCpu(Registry& registry) {
  Stages stages;
  stages.execute = kMoeCpu;
  registry.AddTarget("b12x_moe", stages);
}

}  // namespace b12x::ffi
