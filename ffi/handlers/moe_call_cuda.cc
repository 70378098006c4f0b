#include "ffi/handlers/moe_call_cuda.h"

#include <string>
#include <utility>
#include <vector>

#include "ffi/handlers/launched.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error Refuse(const std::string& message) {
  return xffi::Error::InvalidArgument("b12x_moe on CUDA: " + message);
}

xffi::Error ReadChoices(const MoeAttributes& attributes, xffi::DataType x_type, MoeCall* call) {
  if (attributes.layout != "sm90") {
    return Refuse("the weights are in the layout " + std::string(attributes.layout) +
                  "; it must be sm90 (ExpertWeights.prepare makes it)");
  }
  if (x_type != xffi::DataType::BF16 && x_type != xffi::DataType::F16) {
    return Refuse("x must be bfloat16 or float16");
  }
  const bool fp16 = x_type == xffi::DataType::F16;
  const bool mxfp4 = attributes.weight_format == "mxfp4";
  call->params.x_is_fp16 = fp16;
  if (!mxfp4 && attributes.weight_format != "nvfp4") {
    return Refuse("weight_format is " + std::string(attributes.weight_format) +
                  "; it must be nvfp4 or mxfp4");
  }
  if (attributes.recipe == "nvfp4" && !mxfp4) {
    call->recipe = DecodeRecipeId::kNvfp4;
  } else if (attributes.recipe == "w4a16" && !(mxfp4 && fp16)) {
    call->recipe = mxfp4  ? DecodeRecipeId::kW4A16Mxfp4
                   : fp16 ? DecodeRecipeId::kW4A16Fp16
                          : DecodeRecipeId::kW4A16Bf16;
  } else {
    return Refuse("there is no kernel for recipe " + std::string(attributes.recipe) + " with " +
                  std::string(attributes.weight_format) + " weights and " +
                  (fp16 ? "float16" : "bfloat16") + " activations");
  }
  // The dynamic path is split launches of at most 64 tokens, one after the other.
  if (attributes.implementation == "fused") {
    call->launch = DecodeLaunch::kFused;
  } else if (attributes.implementation == "split" || attributes.implementation == "dynamic") {
    call->launch = DecodeLaunch::kSplit;
  } else {
    return Refuse("implementation is " + std::string(attributes.implementation) +
                  "; it must be fused, split or dynamic");
  }
  if (attributes.activation == "silu") {
    call->params.activation = Activation::kSilu;
  } else if (attributes.activation == "swiglu_oai") {
    call->params.activation = Activation::kSwigluOai;
  } else {
    return Refuse("activation is " + std::string(attributes.activation) +
                  "; it must be silu or swiglu_oai");
  }
  call->params.alpha = attributes.alpha;
  call->params.limit = attributes.limit;
  return xffi::Error::Success();
}

xffi::Error ReadGeometry(const xffi::Dictionary& dictionary, MoeDecodeGeometry* geometry) {
  int64_t fc2_order = 0;
  for (const auto& [name, field] :
       {std::pair{"grid", &geometry->grid}, std::pair{"stages", &geometry->stages},
        std::pair{"fc1_split", &geometry->fc1_split},
        std::pair{"fc2_split", &geometry->fc2_split}}) {
    int64_t value = 0;
    if (xffi::Error error = ReadAttribute(dictionary, name, &value); error.failure()) return error;
    *field = static_cast<int32_t>(value);
  }
  if (xffi::Error error = ReadAttribute(dictionary, "fc2_order", &fc2_order); error.failure()) {
    return error;
  }
  geometry->fc2_order = static_cast<Fc2Order>(fc2_order);
  return xffi::Error::Success();
}

// Checks shapes and fills in sizes and pointers.
xffi::Error ReadBuffers(const MoeAttributes& attributes, const MoeBuffers& buffers, MoeCall* call) {
  const std::vector<xffi::AnyBuffer>& operands = buffers.operands;
  const xffi::AnyBuffer& x = operands[kX];
  const xffi::AnyBuffer& ids = operands[kTopkIds];
  if (x.dimensions().size() != 2 || ids.dimensions().size() != 2 ||
      operands[kW2GlobalScale].dimensions().size() != 1) {
    return Refuse("x and topk_ids must have two axes, w2_global_scale one");
  }
  if (xffi::Error error = ReadChoices(attributes, x.element_type(), call); error.failure()) {
    return error;
  }
  const int64_t tokens = x.dimensions()[0];
  const int64_t top_k = ids.dimensions()[1];
  const int64_t experts = operands[kW2GlobalScale].dimensions()[0];
  const int64_t hidden = attributes.hidden;
  const int64_t intermediate = attributes.intermediate;
  if (hidden <= 0 || intermediate <= 0 || hidden > (1 << 20) || intermediate > (1 << 20)) {
    return Refuse("hidden and intermediate must be between 1 and 2^20");
  }
  const MoeDecodeShape shape =
      ShapeOf(static_cast<int32_t>(hidden), static_cast<int32_t>(intermediate));
  // XLA may hand over an array without elements as one of shape [1].
  const bool has_b13 = operands[kW13Bias].element_count() > 1;
  const bool has_b2 = operands[kW2Bias].element_count() > 1;
  struct Expected {
    const char* name;
    MoeOperand operand;
    xffi::DataType dtype;
    std::vector<int64_t> shape;
  };
  const Expected all[] = {
      {"x", kX, x.element_type(), {tokens, hidden}},
      {"topk_ids", kTopkIds, xffi::DataType::S32, {tokens, top_k}},
      {"topk_weights", kTopkWeights, xffi::DataType::F32, {tokens, top_k}},
      {"w13", kW13, xffi::DataType::U8, {experts, shape.fc1_row_tiles, shape.fc1_k_tiles, 1152}},
      {"w13_global_scale", kW13GlobalScale, xffi::DataType::F32, {experts, 2}},
      {"w2", kW2, xffi::DataType::U8, {experts, shape.fc2_row_tiles, shape.fc2_k_tiles, 1152}},
      {"w2_global_scale", kW2GlobalScale, xffi::DataType::F32, {experts}},
      {"w13_input_scale", kW13InputScale, xffi::DataType::F32, {}},
      {"w2_input_scale", kW2InputScale, xffi::DataType::F32, {experts}},
      {"w13_bias", kW13Bias, xffi::DataType::F32, {experts, 2 * intermediate}},
      {"w2_bias", kW2Bias, xffi::DataType::F32, {experts, hidden}},
  };
  for (const Expected& expected : all) {
    if ((expected.operand == kW13Bias && !has_b13) || (expected.operand == kW2Bias && !has_b2)) {
      continue;
    }
    xffi::Error error =
        CheckBuffer(expected.name, operands[expected.operand], expected.dtype, expected.shape);
    if (error.failure()) return error;
  }
  const xffi::AnyBuffer& out = *buffers.out;
  xffi::Error error = CheckBuffer("out", out, x.element_type(), {tokens, hidden});
  if (error.failure()) return error;
  const xffi::AnyBuffer& scratch = *buffers.scratch;

  const auto data = [&](MoeOperand operand) { return operands[operand].untyped_data(); };
  const auto f32 = [&](MoeOperand operand) { return static_cast<const float*>(data(operand)); };
  MoeDecodeParams& p = call->params;
  p.x = data(kX);
  p.topk_ids = static_cast<const int32_t*>(data(kTopkIds));
  p.topk_weights = f32(kTopkWeights);
  p.w13 = static_cast<const uint8_t*>(data(kW13));
  p.w2 = static_cast<const uint8_t*>(data(kW2));
  p.w13_global = f32(kW13GlobalScale);
  p.w2_global = f32(kW2GlobalScale);
  p.w13_input = f32(kW13InputScale);
  p.w2_input = f32(kW2InputScale);
  p.w13_bias = has_b13 ? f32(kW13Bias) : nullptr;
  p.w2_bias = has_b2 ? f32(kW2Bias) : nullptr;
  p.out = out.untyped_data();
  p.num_tokens = static_cast<int32_t>(tokens);
  p.hidden = static_cast<int32_t>(hidden);
  p.intermediate = static_cast<int32_t>(intermediate);
  p.num_experts = static_cast<int32_t>(experts);
  p.top_k = static_cast<int32_t>(top_k);
  call->scratch = scratch.untyped_data();
  call->scratch_bytes = static_cast<int64_t>(scratch.size_bytes());
  // For tests of the barrier's bound: a plan never says it.
  if (attributes.geometry.contains("unchecked_residency")) {
    call->residency = DecodeResidency::kUnchecked;
  }
  return ReadGeometry(attributes.geometry, &p.geometry);
}

// Runs before every execution, of captured programs as well.
xffi::Error InitializeWorkspaceCall(WorkspaceCall* state, int32_t device, cudaStream_t stream,
                                    xffi::Dictionary) {
  return PrepareWorkspace(state, device, stream);
}

}  // namespace

xffi::Error ReadMoeCall(const xffi::Dictionary& dictionary, const MoeBuffers& buffers,
                        MoeCall* call) {
  MoeAttributes attributes;
  if (xffi::Error error = ReadMoeAttributes(dictionary, &attributes); error.failure()) return error;
  return ReadBuffers(attributes, buffers, call);
}

runtime::CudaWorkspace* WorkspaceOn(const WorkspaceCall& state, int32_t device) {
  if (!state.lease.has_value()) return nullptr;
  return &static_cast<runtime::CudaWorkspace&>(state.lease->On(device));
}

XLA_FFI_DEFINE_HANDLER(kInitializeWorkspace, InitializeWorkspaceCall,
                       xffi::Ffi::BindInitialize()
                           .Ctx<xffi::State<WorkspaceCall>>()
                           .Ctx<xffi::DeviceOrdinal>()
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .Attrs());

Stages CudaWorkspaceStages(XLA_FFI_Handler* execute) {
  Stages stages = WorkspaceStages(execute);
  stages.initialize = kInitializeWorkspace;
  return stages;
}

void UseBarrier(const runtime::CudaWorkspace* workspace, int64_t offset, MoeCall* call) {
  if (workspace == nullptr || call->launch != DecodeLaunch::kFused ||
      offset + static_cast<int64_t>(sizeof(uint64_t)) > workspace->bytes()) {
    return;
  }
  call->params.barrier.word =
      reinterpret_cast<uint64_t*>(static_cast<char*>(workspace->data()) + offset);
  call->params.barrier.fault = workspace->fault_word();
  call->params.barrier.timeout_ns = workspace->timeout_ns();
}

xffi::Error LaunchMoe(const MoeCall& call, cudaStream_t stream) {
  return Launched(launch_moe_decode(call.params, call.recipe, call.launch, call.scratch,
                                    call.scratch_bytes, stream, call.residency),
                  "b12x_moe on CUDA");
}

}  // namespace b12x::ffi
