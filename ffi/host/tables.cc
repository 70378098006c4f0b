// Values of E4M3 and E8M0 by their byte (OCP 8-bit Floating Point and Microscaling specifications).
#include <limits>

#include "ffi/host/kernels.h"

namespace b12x::host {
namespace {

constexpr float PowerOfTwo(int exponent) {
  float value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}

constexpr float E4m3(int byte) {
  const int exponent = (byte >> 3) & 15;
  const int mantissa = byte & 7;
  const float sign = byte & 0x80 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * static_cast<float>(mantissa) * PowerOfTwo(-9);
  return sign * static_cast<float>(8 + mantissa) * PowerOfTwo(exponent - 10);
}

constexpr float E8m0(int byte) {
  return byte == 255 ? std::numeric_limits<float>::quiet_NaN() : PowerOfTwo(byte - 127);
}

}  // namespace

#define B12X_4(f, i) f(i), f(i + 1), f(i + 2), f(i + 3)
#define B12X_16(f, i) B12X_4(f, i), B12X_4(f, i + 4), B12X_4(f, i + 8), B12X_4(f, i + 12)
#define B12X_64(f, i) B12X_16(f, i), B12X_16(f, i + 16), B12X_16(f, i + 32), B12X_16(f, i + 48)
#define B12X_256(f) B12X_64(f, 0), B12X_64(f, 64), B12X_64(f, 128), B12X_64(f, 192)

const float kE4m3Values[256] = {B12X_256(E4m3)};
const float kE8m0Values[256] = {B12X_256(E8m0)};

}  // namespace b12x::host
