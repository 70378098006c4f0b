#include "ffi/host/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace b12x::host {
namespace {

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float FromBf16(uint16_t half) { return FromBits(static_cast<uint32_t>(half) << 16); }

uint16_t ToBf16(float value) {
  const uint32_t bits = Bits(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float FromF16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31;
  const uint32_t mantissa = half & 0x3ff;
  if (exponent == 31) return FromBits(sign | 0x7f800000 | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  return FromBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t ToF16(float value) {
  const uint32_t bits = Bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past 65504
  if (magnitude < 0x38800000) {  // subnormal: the sum's last mantissa bit is worth 2^-24
    return static_cast<uint16_t>(sign | (Bits(FromBits(magnitude) + 0.5f) - Bits(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - (uint32_t{112} << 23)) >> 13));
}

// The value of e4m3(value), rounded to nearest even and saturated; not for NaN.
float RoundToE4m3(float value) {
  const float magnitude = std::fabs(value);
  float rounded;
  if (magnitude >= 448.0f) {
    rounded = 448.0f;
  } else if (magnitude < 0x1p-6f) {
    rounded = (magnitude + 0x1p14f) - 0x1p14f;  // multiples of 2^-9
  } else {
    const uint32_t bits = Bits(magnitude);
    rounded =
        std::min(FromBits((bits + 0x7ffff + ((bits >> 20) & 1)) & ~uint32_t{0xfffff}), 448.0f);
  }
  return std::copysign(rounded, value);
}

// Twice the value of e2m1(value), rounded to nearest, ties to the even code, saturated.
int8_t TwiceE2m1(float value) {
  static constexpr int8_t kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  const float v = std::fabs(value);
  const int code = (v > 0.25f) + (v >= 0.75f) + (v > 1.25f) + (v >= 1.75f) + (v > 2.5f) +
                   (v >= 3.5f) + (v > 5.0f);
  return std::signbit(value) ? static_cast<int8_t>(-kTwice[code]) : kTwice[code];
}

}  // namespace

int64_t DtypeBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

float ReadElement(const void* array, Dtype dtype, int64_t index) {
  switch (dtype) {
    case Dtype::kBf16:
      return FromBf16(static_cast<const uint16_t*>(array)[index]);
    case Dtype::kF16:
      return FromF16(static_cast<const uint16_t*>(array)[index]);
    case Dtype::kF32:
      break;
  }
  return static_cast<const float*>(array)[index];
}

void WriteElement(float value, Dtype dtype, void* array, int64_t index) {
  switch (dtype) {
    case Dtype::kBf16:
      static_cast<uint16_t*>(array)[index] = ToBf16(value);
      return;
    case Dtype::kF16:
      static_cast<uint16_t*>(array)[index] = ToF16(value);
      return;
    case Dtype::kF32:
      break;
  }
  static_cast<float*>(array)[index] = value;
}

float RoundTo(float value, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return FromBf16(ToBf16(value));
    case Dtype::kF16:
      return FromF16(ToF16(value));
    case Dtype::kF32:
      break;
  }
  return value;
}

int64_t RowBytes(Recipe recipe, int64_t columns) {
  if (recipe == Recipe::kNvfp4) {
    return (columns + kFp4Columns - 1) / kFp4Columns * static_cast<int64_t>(sizeof(Fp4Group));
  }
  return (columns + kWideColumns - 1) / kWideColumns * kWideColumns *
         static_cast<int64_t>(sizeof(float));
}

void StoreWide(const float* values, int count, int64_t group, float* row) {
  float* columns = row + group * kWideColumns;
  for (int i = 0; i < kWideColumns; ++i) {
    columns[(i % 2) * kLanes + i / 2] = i < count ? values[i] : 0.0f;
  }
}

void StoreFp4Block(const float* values, float global_scale, int64_t block, Fp4Group* row) {
  constexpr int kBlock = 16;
  constexpr int kBlocks = kFp4Columns / kBlock;
  Fp4Group& group = row[block / kBlocks];
  const int first_byte = static_cast<int>(block % kBlocks) * kBlock / 2;
  const int first_lane = static_cast<int>(block % kBlocks) * 2;

  float amax = 0;
  bool nan = false;
  for (int i = 0; i < kBlock; ++i) {
    nan |= std::isnan(values[i]);
    amax = std::max(amax, std::fabs(values[i]));
  }
  float scale = 0;
  if (nan) {
    scale = std::numeric_limits<float>::quiet_NaN();
  } else if (global_scale > 0) {
    scale = RoundToE4m3((amax / 6.0f) / global_scale);
  }
  const bool empty = !(scale > 0);
  const float step = scale * global_scale;
  int8_t twice[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    // An infinity saturates even where the step itself overflowed.
    const float element = std::isinf(values[i]) ? values[i] : values[i] / step;
    twice[i] = empty ? int8_t{0} : TwiceE2m1(element);
  }
  for (int i = 0; i < kBlock / 2; ++i) {
    group.even[first_byte + i] = twice[2 * i];
    group.odd[first_byte + i] = twice[2 * i + 1];
  }
  for (int half = 0; half < 2; ++half) {
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum += twice[8 * half + i];
    group.offset[first_lane + half] = 12 * sum;
    group.scale[first_lane + half] = scale * 0.25f;
  }
}

void ClearFp4Tail(int64_t columns, Fp4Group* row) {
  constexpr int kBlock = 16;
  const float zeros[kBlock] = {};
  const int64_t blocks = RowBytes(Recipe::kNvfp4, columns) / (2 * kBlock);
  for (int64_t block = columns / kBlock; block < blocks; ++block) {
    StoreFp4Block(zeros, 1.0f, block, row);
  }
}

float UsableGlobalScale(float global_scale) {
  return std::isfinite(global_scale) && global_scale > 0 ? global_scale : 0.0f;
}

float Sigmoid(float value) { return 1.0f / (1.0f + std::exp(-value)); }

float Activate(float gate, float up, const Activation& activation) {
  if (activation.kind == ActivationKind::kSilu) {
    return gate * Sigmoid(gate) * up;
  }
  // Written so that a NaN stays one.
  if (gate > activation.limit) gate = activation.limit;
  if (up > activation.limit) up = activation.limit;
  if (up < -activation.limit) up = -activation.limit;
  return (up + 1.0f) * gate * Sigmoid(activation.alpha * gate);
}

}  // namespace b12x::host
