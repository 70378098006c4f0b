// One MoE of the `cpu` platform, decoded and checked: a whole call, or a part of a block.
#ifndef JAX_B12X_FFI_HANDLERS_MOE_CALL_CPU_H_
#define JAX_B12X_FFI_HANDLERS_MOE_CALL_CPU_H_

#include "ffi/handlers/moe_attributes.h"
#include "ffi/handlers/moe_operands.h"
#include "ffi/host/moe.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

xla::ffi::Error ReadMoeCall(const xla::ffi::Dictionary& attributes, const MoeBuffers& buffers,
                            host::MoeProblem* problem);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_MOE_CALL_CPU_H_
