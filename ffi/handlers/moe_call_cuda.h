// One MoE of the `CUDA` platform, decoded and checked: a whole call, or a part of a block.
#ifndef JAX_B12X_FFI_HANDLERS_MOE_CALL_CUDA_H_
#define JAX_B12X_FFI_HANDLERS_MOE_CALL_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/moe_decode.h"
#include "ffi/handlers/moe_attributes.h"
#include "ffi/handlers/moe_operands.h"
#include "ffi/handlers/workspace_call.h"
#include "ffi/runtime/workspace_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// A decoded call.
struct MoeCall {
  MoeDecodeParams params{};
  DecodeRecipeId recipe = DecodeRecipeId::kW4A16Bf16;
  DecodeLaunch launch = DecodeLaunch::kFused;
  DecodeResidency residency = DecodeResidency::kCooperative;
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

xla::ffi::Error ReadMoeCall(const xla::ffi::Dictionary& attributes, const MoeBuffers& buffers,
                            MoeCall* call);

// The part of the call's workspace that is on the device; null where it keeps nothing. Throws where
// *initialize* has not made it.
runtime::CudaWorkspace* WorkspaceOn(const WorkspaceCall& state, int32_t device);

// The stages of a target with a workspace on the `CUDA` platform.
Stages CudaWorkspaceStages(XLA_FFI_Handler* execute);

// What an *execute* of the `CUDA` platform is a function of, with a workspace.
inline auto BindCudaExecute() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::State<WorkspaceCall>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

// Gives a fused launch the word of its grid barrier, at an offset of the workspace.
void UseBarrier(const runtime::CudaWorkspace* workspace, int64_t offset, MoeCall* call);

xla::ffi::Error LaunchMoe(const MoeCall& call, cudaStream_t stream);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_MOE_CALL_CUDA_H_
