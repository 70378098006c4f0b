// What a MoE decode kernel is compiled for.
#pragma once

#include "cuda/formats/fp4_tile.cuh"

namespace b12x {

// kFp16: the products' operands are fp16. kQuantized: activations are quantized to NVFP4 on the
// fly.
template <bool kFp16_, ScaleFormat kScale_, bool kQuantized_>
struct DecodeRecipe {
  static constexpr bool kFp16 = kFp16_;
  static constexpr ScaleFormat kScale = kScale_;
  static constexpr bool kQuantized = kQuantized_;
  using Math = TileMath<kFp16, kScale>;
  static_assert(!kQuantized || !kFp16, "quantized activations are bf16 numbers");
};

using W4A16Bf16 = DecodeRecipe<false, ScaleFormat::kE4M3, false>;
using W4A16Fp16 = DecodeRecipe<true, ScaleFormat::kE4M3, false>;
using W4A16Mxfp4 = DecodeRecipe<false, ScaleFormat::kE8M0, false>;
using Nvfp4 = DecodeRecipe<false, ScaleFormat::kE4M3, true>;

}  // namespace b12x
