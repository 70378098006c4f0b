// `b12x_moe` on the `CUDA` platform: decodes operands and attributes, checks them, launches.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/launch/moe_decode.h"
#include "ffi/handlers/families.h"
#include "ffi/handlers/moe_attributes.h"
#include "ffi/handlers/moe_operands.h"
#include "xla/ffi/api/ffi.h"

namespace b12x::ffi {
namespace {

namespace xffi = xla::ffi;

// A decoded call.
struct MoeCall {
  MoeDecodeParams params{};
  DecodeRecipeId recipe = DecodeRecipeId::kW4A16Bf16;
  DecodeLaunch launch = DecodeLaunch::kFused;
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

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
xffi::Error ReadBuffers(const MoeAttributes& attributes, xffi::RemainingArgs args,
                        xffi::RemainingRets rets, MoeCall* call) {
  if (args.size() != kNumMoeOperands || rets.size() != kNumMoeResults) {
    return Refuse("it takes 13 operands and gives 2 results");
  }
  std::vector<xffi::AnyBuffer> operands;
  for (size_t i = 0; i < kNumMoeOperands; ++i) operands.push_back(*args.get<xffi::AnyBuffer>(i));
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
  xffi::AnyBuffer out = **rets.get<xffi::AnyBuffer>(kOut);
  xffi::Error error = CheckBuffer("out", out, x.element_type(), {tokens, hidden});
  if (error.failure()) return error;
  xffi::AnyBuffer scratch = **rets.get<xffi::AnyBuffer>(kScratch);

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
  return ReadGeometry(attributes.geometry, &p.geometry);
}

xffi::Error MoeCuda(cudaStream_t stream, xffi::RemainingArgs args, xffi::RemainingRets rets,
                    xffi::Dictionary dictionary) {
  MoeAttributes attributes;
  MoeCall call;
  if (xffi::Error error = ReadMoeAttributes(dictionary, &attributes); error.failure()) return error;
  if (xffi::Error error = ReadBuffers(attributes, args, rets, &call); error.failure()) return error;
  const LaunchStatus status = launch_moe_decode(call.params, call.recipe, call.launch, call.scratch,
                                                call.scratch_bytes, stream);
  if (status.reason != nullptr) return Refuse(status.reason);
  if (status.error != cudaSuccess) {
    return xffi::Error::Internal(std::string("b12x_moe on CUDA: the launch failed: ") +
                                 cudaGetErrorString(status.error));
  }
  return xffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMoeCuda, MoeCuda,
                       xffi::Ffi::Bind()
                           .Ctx<xffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {xffi::Traits::kCmdBufferCompatible});

}  // namespace

void RegisterMoeCuda(Registry& registry) {
  Stages stages;
  stages.execute = kMoeCuda;
  registry.AddTarget("b12x_moe", stages);
}

}  // namespace b12x::ffi
