#include "ffi/host/dense_dot.h"

#include <algorithm>
#include <cstring>

namespace b12x::host {
namespace {

constexpr int kSums = 16;      // partial sums of a product, by column
constexpr int kColumns = 512;  // of a row that are widened at a time

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float WidenF16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{half & 0x7fffu} << 13;
  // The exponent is 112 too small, of subnormal numbers as well; infinities and NaNs have all ones.
  const float value = FromBits(magnitude) * 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return FromBits(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : bits));
}

// The fixed tree: sums i and i + 8, i and i + 4, i and i + 2, i and i + 1.
float Total(const float* sums) {
  float left[kSums];
  std::copy(sums, sums + kSums, left);
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) left[i] += left[i + half];
  }
  return left[0];
}

}  // namespace

void Widen(const void* array, Dtype dtype, int64_t first, int64_t count, float* out) {
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(out, static_cast<const float*>(array) + first, count * sizeof(float));
      return;
    case Dtype::kBf16: {
      const uint16_t* const from = static_cast<const uint16_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = FromBits(uint32_t{from[i]} << 16);
      return;
    }
    case Dtype::kF16: {
      const uint16_t* const from = static_cast<const uint16_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = WidenF16(from[i]);
      return;
    }
  }
}

void DotRow(const void* weights, Dtype dtype, int64_t first, int64_t columns,
            const float* activations, int count, float* out) {
  alignas(64) float row[kColumns];
  alignas(64) float sums[kMaxDenseActivations][kSums] = {};
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t size = std::min<int64_t>(kColumns, columns - begin);
    Widen(weights, dtype, first + begin, size, row);
    for (int m = 0; m < count; ++m) {
      const float* const a = activations + m * columns + begin;
      float local[kSums];
      std::copy(sums[m], sums[m] + kSums, local);
      for (int64_t c = 0; c < size; c += kSums) {
        for (int i = 0; i < kSums; ++i) local[i] += row[c + i] * a[c + i];
      }
      std::copy(local, local + kSums, sums[m]);
    }
  }
  for (int m = 0; m < count; ++m) out[m] = Total(sums[m]);
}

}  // namespace b12x::host
