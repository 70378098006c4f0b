// `b12x_moe_block`'s operands, results and attributes, as `jax_b12x/moe/block.py` passes them, for
// every platform.
#ifndef JAX_B12X_FFI_HANDLERS_BLOCK_CALL_H_
#define JAX_B12X_FFI_HANDLERS_BLOCK_CALL_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "ffi/handlers/block_program.h"
#include "ffi/handlers/dense_mlp_call.h"
#include "ffi/handlers/moe_operands.h"
#include "ffi/handlers/router_call.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {

// What a block keeps on the device from run to run lies at these places of its workspace.
inline constexpr int64_t kRoutedBarrierOffset = 0;
inline constexpr int64_t kSharedBarrierOffset = 256;

// A call's buffers, sorted by what they are for, and its attributes.
//
// Operands: x; the router's weight, bias and token_mask, or topk_ids and topk_weights; the routed
// experts' ten arrays; of a packed shared expert its ids and weights and ten arrays, of a dense one
// w13, w2, w13_bias, w2_bias and shared_gate. Results: out; of a router topk_ids, topk_weights,
// logits and its scratch; the routed experts' scratch; with a shared expert the routed result, the
// shared result and its scratch.
struct BlockCall {
  BlockProgram program;
  std::optional<xla::ffi::AnyBuffer> out;

  std::optional<RouterBuffers> router;
  RouterAttributes router_attributes{};
  std::optional<xla::ffi::AnyBuffer> router_scratch;

  MoeBuffers routed;
  xla::ffi::Dictionary routed_attributes{nullptr};

  // One of the two, where there is a shared expert.
  std::optional<MoeBuffers> shared_experts;
  xla::ffi::Dictionary shared_attributes{nullptr};
  std::optional<DenseMlpBuffers> dense;
  std::string_view dense_activation;
  float dense_alpha = 0;
  float dense_limit = 0;
  std::optional<xla::ffi::AnyBuffer> shared_out;
  std::optional<xla::ffi::AnyBuffer> dense_scratch;
};

// Sorts a call; whoever decodes the parts checks their dtypes and shapes.
xla::ffi::Error ReadBlockCall(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                              xla::ffi::Dictionary attributes, BlockCall* call);

}  // namespace b12x::ffi

#endif  // JAX_B12X_FFI_HANDLERS_BLOCK_CALL_H_
