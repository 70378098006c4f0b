#include "ffi/handlers/moe_call_cpu.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

xffi::Error Refuse(const std::string& message) {
  return xffi::Error::InvalidArgument("b12x_moe on cpu: " + message);
}

xffi::Error ReadEnums(const MoeAttributes& attributes, host::MoeProblem* problem) {
  if (attributes.layout != "checkpoint") {
    return Refuse("the weights are prepared for " + std::string(attributes.layout) +
                  "; pass them in the checkpoint layout, as they were loaded");
  }
  if (attributes.recipe == "w4a16") {
    problem->recipe = host::Recipe::kW4A16;
  } else if (attributes.recipe == "nvfp4") {
    problem->recipe = host::Recipe::kNvfp4;
  } else {
    return Refuse("recipe is " + std::string(attributes.recipe) + "; it must be w4a16 or nvfp4");
  }
  if (attributes.weight_format == "nvfp4") {
    problem->weight_format = host::WeightFormat::kNvfp4;
  } else if (attributes.weight_format == "mxfp4" && problem->recipe == host::Recipe::kW4A16) {
    problem->weight_format = host::WeightFormat::kMxfp4;
  } else {
    return Refuse("weight_format is " + std::string(attributes.weight_format) +
                  "; it must be nvfp4, or mxfp4 in the recipe w4a16");
  }
  if (attributes.implementation == "fused") {
    problem->implementation = host::Implementation::kFused;
  } else if (attributes.implementation == "split") {
    problem->implementation = host::Implementation::kSplit;
  } else if (attributes.implementation == "dynamic") {
    problem->implementation = host::Implementation::kDynamic;
  } else {
    return Refuse("implementation is " + std::string(attributes.implementation) +
                  "; it must be fused, split or dynamic");
  }
  if (attributes.activation == "silu") {
    problem->activation.kind = host::ActivationKind::kSilu;
  } else if (attributes.activation == "swiglu_oai") {
    problem->activation.kind = host::ActivationKind::kSwigluOai;
  } else {
    return Refuse("activation is " + std::string(attributes.activation) +
                  "; it must be silu or swiglu_oai");
  }
  problem->activation.alpha = attributes.alpha;
  problem->activation.limit = attributes.limit;
  const std::optional<host::Isa> isa = host::FindIsa(attributes.host_isa);
  if (!isa.has_value()) {
    return Refuse("this processor cannot run the instruction set " +
                  std::string(attributes.host_isa) + " that the program was traced for");
  }
  problem->isa = *isa;
  return xffi::Error::Success();
}

xffi::Error ReadDtype(xffi::DataType dtype, host::MoeProblem* problem) {
  switch (dtype) {
    case xffi::DataType::F32:
      problem->dtype = host::Dtype::kF32;
      return xffi::Error::Success();
    case xffi::DataType::BF16:
      problem->dtype = host::Dtype::kBf16;
      return xffi::Error::Success();
    case xffi::DataType::F16:
      problem->dtype = host::Dtype::kF16;
      return xffi::Error::Success();
    default:
      return Refuse("x must be float32, bfloat16 or float16");
  }
}

// Checks shapes and fills in sizes and pointers.
xffi::Error ReadBuffers(const MoeAttributes& attributes, const MoeBuffers& buffers,
                        host::MoeProblem* problem) {
  const std::vector<xffi::AnyBuffer>& operands = buffers.operands;
  const xffi::AnyBuffer& x = operands[kX];
  const xffi::AnyBuffer& ids = operands[kTopkIds];
  if (x.dimensions().size() != 2 || ids.dimensions().size() != 2 ||
      operands[kW2GlobalScale].dimensions().size() != 1) {
    return Refuse("x and topk_ids must have two axes, w2_global_scale one");
  }
  const int64_t tokens = x.dimensions()[0];
  const int64_t top_k = ids.dimensions()[1];
  const int64_t experts = operands[kW2GlobalScale].dimensions()[0];
  const int64_t hidden = attributes.hidden;
  const int64_t intermediate = attributes.intermediate;
  const bool mxfp4 = problem->weight_format == host::WeightFormat::kMxfp4;
  const int64_t block = mxfp4 ? 32 : 16;
  if (hidden <= 0 || intermediate <= 0 || hidden % block || intermediate % block) {
    return Refuse("hidden and intermediate must be positive multiples of " + std::to_string(block));
  }
  const xffi::DataType scale = mxfp4 ? xffi::DataType::F8E8M0FNU : xffi::DataType::F8E4M3FN;
  // An absent bias is one element of rank 1.
  const auto bias_shape = [&](MoeOperand operand, int64_t columns) -> std::vector<int64_t> {
    if (operands[operand].dimensions().size() == 1) return {1};
    return {experts, columns};
  };
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
      {"w13", kW13, xffi::DataType::U8, {experts, 2 * intermediate, hidden / 2}},
      {"w13_scale", kW13Scale, scale, {experts, 2 * intermediate, hidden / block}},
      {"w13_global_scale", kW13GlobalScale, xffi::DataType::F32, {experts, 2}},
      {"w2", kW2, xffi::DataType::U8, {experts, hidden, intermediate / 2}},
      {"w2_scale", kW2Scale, scale, {experts, hidden, intermediate / block}},
      {"w2_global_scale", kW2GlobalScale, xffi::DataType::F32, {experts}},
      {"w13_input_scale", kW13InputScale, xffi::DataType::F32, {}},
      {"w2_input_scale", kW2InputScale, xffi::DataType::F32, {experts}},
      {"w13_bias", kW13Bias, xffi::DataType::F32, bias_shape(kW13Bias, 2 * intermediate)},
      {"w2_bias", kW2Bias, xffi::DataType::F32, bias_shape(kW2Bias, hidden)},
  };
  for (const Expected& expected : all) {
    xffi::Error error =
        CheckBuffer(expected.name, operands[expected.operand], expected.dtype, expected.shape);
    if (error.failure()) return error;
  }
  if (xffi::Error error = ReadDtype(x.element_type(), problem); error.failure()) return error;

  problem->num_tokens = tokens;
  problem->hidden = hidden;
  problem->intermediate = intermediate;
  problem->num_experts = experts;
  problem->top_k = top_k;
  xffi::Error error = ReadAttribute(attributes.geometry, "slab_tokens", &problem->slab_tokens);
  if (error.failure()) return error;
  if (problem->slab_tokens < 1) return Refuse("geometry.slab_tokens must be 1 or more");

  const auto data = [&](MoeOperand operand) { return operands[operand].untyped_data(); };
  const auto f32 = [&](MoeOperand operand) { return static_cast<const float*>(data(operand)); };
  const auto bias = [&](MoeOperand operand) {
    return operands[operand].dimensions().size() == 1 ? nullptr : f32(operand);
  };
  const auto bytes = [&](MoeOperand operand) { return static_cast<const uint8_t*>(data(operand)); };
  problem->x = data(kX);
  problem->topk_ids = static_cast<const int32_t*>(data(kTopkIds));
  problem->topk_weights = f32(kTopkWeights);
  problem->w13 = bytes(kW13);
  problem->w13_scale = bytes(kW13Scale);
  problem->w13_global_scale = f32(kW13GlobalScale);
  problem->w2 = bytes(kW2);
  problem->w2_scale = bytes(kW2Scale);
  problem->w2_global_scale = f32(kW2GlobalScale);
  problem->w13_input_scale = f32(kW13InputScale);
  problem->w2_input_scale = f32(kW2InputScale);
  problem->w13_bias = bias(kW13Bias);
  problem->w2_bias = bias(kW2Bias);

  const xffi::AnyBuffer& out = *buffers.out;
  error = CheckBuffer("out", out, x.element_type(), {tokens, hidden});
  if (error.failure()) return error;
  const xffi::AnyBuffer& scratch = *buffers.scratch;
  problem->out = out.untyped_data();
  problem->scratch = scratch.untyped_data();
  const int64_t needed = host::MoeScratchBytes(*problem);
  if (static_cast<int64_t>(scratch.size_bytes()) != needed) {
    return Refuse("scratch has " + std::to_string(scratch.size_bytes()) +
                  " bytes; the call needs " + std::to_string(needed));
  }
  return xffi::Error::Success();
}

}  // namespace

xffi::Error ReadMoeCall(const xffi::Dictionary& dictionary, const MoeBuffers& buffers,
                        host::MoeProblem* problem) {
  MoeAttributes attributes;
  if (xffi::Error error = ReadMoeAttributes(dictionary, &attributes); error.failure()) return error;
  if (xffi::Error error = ReadEnums(attributes, problem); error.failure()) return error;
  return ReadBuffers(attributes, buffers, problem);
}

}  // namespace b12x::ffi
