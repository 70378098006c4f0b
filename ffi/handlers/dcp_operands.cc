#include "ffi/handlers/dcp_operands.h"

#include <string>

namespace b12x::ffi {

namespace xffi = xla::ffi;

namespace {

xffi::Unexpected<xffi::Error> Invalid(const std::string& message) {
  return xffi::Unexpected(xffi::Error::InvalidArgument(message));
}

// The product of dimensions `begin` to `end`.
int64_t Product(xffi::AnyBuffer::Dimensions dims, int64_t begin, int64_t end) {
  int64_t product = 1;
  for (int64_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

bool IsHeadsAxis(const xffi::AnyBuffer& array, int64_t axis) {
  return axis >= 0 && axis + 1 < static_cast<int64_t>(array.dimensions().size());
}

bool IsGathered(xffi::DataType type) {
  switch (type) {
    case xffi::F32:
    case xffi::F16:
    case xffi::BF16:
    case xffi::F8E4M3FN:
    case xffi::F8E5M2:
      return true;
    default:
      return false;
  }
}

}  // namespace

xffi::ErrorOr<CombineOperands> DecodeCombine(const xffi::RemainingArgs& args,
                                             const xffi::RemainingRets& rets,
                                             const xffi::Dictionary& attrs, int world_size) {
  const auto partial = args.get<xffi::AnyBuffer>(0);
  const auto lse = args.get<xffi::AnyBuffer>(1);
  auto out = rets.get<xffi::AnyBuffer>(0);
  const auto axis = attrs.get<int64_t>("heads_axis");
  const auto base_two = attrs.get<int64_t>("base_two");
  const auto return_lse = attrs.get<int64_t>("return_lse");
  if (!partial || !lse || !out || !axis || !base_two || !return_lse ||
      !IsHeadsAxis(*partial, *axis)) {
    return Invalid(
        "b12x_dcp_combine takes partial_out and lse, and the attributes heads_axis, "
        "base_two and return_lse (int64)");
  }
  CombineOperands operands;
  operands.type = partial->element_type();
  if (operands.type != xffi::F32 && operands.type != xffi::F16 && operands.type != xffi::BF16) {
    return Invalid("b12x_dcp_combine: partial_out must be f32, f16 or bf16");
  }
  const auto dims = partial->dimensions();
  const auto last = static_cast<int64_t>(dims.size()) - 1;
  operands.head_dim = dims[last];
  if (operands.head_dim <= 0 || operands.head_dim % 8 != 0 || dims[*axis] % world_size != 0) {
    return Invalid(
        "b12x_dcp_combine: head_dim must be a multiple of 8, and the heads divisible by "
        "the ranks");
  }
  operands.rows.outer = Product(dims, 0, *axis);
  operands.rows.inner = dims[*axis] / world_size * Product(dims, *axis + 1, last);
  operands.rows.world_size = world_size;
  const int64_t rows = operands.rows.count();
  operands.element_bytes = static_cast<int64_t>(xffi::ByteWidth(operands.type));
  if (lse->element_type() != xffi::F32 ||
      static_cast<int64_t>(lse->element_count()) != rows * world_size ||
      (*out)->element_type() != operands.type ||
      static_cast<int64_t>((*out)->element_count()) != operands.out_elements()) {
    return Invalid("b12x_dcp_combine: lse or the result does not fit partial_out");
  }
  operands.partial = partial->untyped_data();
  operands.lse = static_cast<const float*>(lse->untyped_data());
  operands.out = (*out)->untyped_data();
  operands.base_two = *base_two != 0;
  if (*return_lse != 0) {
    auto out_lse = rets.get<xffi::AnyBuffer>(1);
    if (!out_lse || (*out_lse)->element_type() != xffi::F32 ||
        static_cast<int64_t>((*out_lse)->element_count()) != rows) {
      return Invalid("b12x_dcp_combine: the resulting lse must be f32, one a row");
    }
    operands.out_lse = static_cast<float*>((*out_lse)->untyped_data());
    operands.num_rets = 2;
  }
  operands.message_bytes =
      comm::CombineSlotBytes(operands.rows, operands.head_dim, operands.element_bytes);
  return operands;
}

xffi::ErrorOr<GatherOperands> DecodeGather(const xffi::RemainingArgs& args,
                                           const xffi::RemainingRets& rets,
                                           const xffi::Dictionary& attrs, int world_size) {
  const auto first_axis = attrs.get<int64_t>("heads_axis");
  const auto second_axis = attrs.get<int64_t>("second_axis");
  if (!first_axis || !second_axis) {
    return Invalid("b12x_dcp_gather takes the attributes heads_axis and second_axis (int64)");
  }
  GatherOperands operands;
  for (const int64_t axis : {*first_axis, *second_axis}) {
    const size_t index = operands.tensors.size();
    if (index == 1 && axis < 0) break;
    const auto part = args.get<xffi::AnyBuffer>(index);
    auto whole = rets.get<xffi::AnyBuffer>(index);
    if (!part || !whole || !IsHeadsAxis(*part, axis) || !IsGathered(part->element_type())) {
      return Invalid("b12x_dcp_gather takes tensors of heads: f32, f16, bf16, f8e4m3fn or f8e5m2");
    }
    const auto dims = part->dimensions();
    GatherOperands::Tensor tensor;
    tensor.part = part->untyped_data();
    tensor.whole = (*whole)->untyped_data();
    tensor.outer = Product(dims, 0, axis);
    tensor.row_bytes = Product(dims, axis, static_cast<int64_t>(dims.size())) *
                       static_cast<int64_t>(xffi::ByteWidth(part->element_type()));
    if ((*whole)->element_type() != part->element_type() ||
        static_cast<int64_t>((*whole)->size_bytes()) != tensor.part_bytes() * world_size ||
        tensor.row_bytes % 8 != 0) {
      return Invalid(
          "b12x_dcp_gather: the result does not fit its tensor, or the last dimension "
          "is not a multiple of 8");
    }
    operands.message_bytes += comm::GatherSlotBytes(tensor.part_bytes());
    operands.tensors.push_back(tensor);
  }
  return operands;
}

}  // namespace b12x::ffi
