// The dtypes of messages on the host: widening to fp32 and rounding from it.
#ifndef JAX_B12X_FFI_HOST_FLOAT_TYPES_H_
#define JAX_B12X_FFI_HOST_FLOAT_TYPES_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace b12x::host {

enum class FloatType { kF32, kF16, kBF16 };

struct F32 {
  using Bits = uint32_t;
  static float Widen(Bits bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static Bits Round(float value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
};

struct BF16 {
  using Bits = uint16_t;
  static float Widen(Bits bits) { return F32::Widen(static_cast<uint32_t>(bits) << 16); }
  static Bits Round(float value) {
    const uint32_t bits = F32::Round(value);
    if (std::isnan(value)) return static_cast<Bits>((bits >> 16) | 0x40);
    return static_cast<Bits>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct F16 {
  using Bits = uint16_t;
  __extension__ using Half = _Float16;
  static float Widen(Bits bits) {
    Half value;
    std::memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
  }
  static Bits Round(float value) {
    const Half half = static_cast<Half>(value);
    Bits bits;
    std::memcpy(&bits, &half, sizeof(bits));
    return bits;
  }
};

template <typename F>
auto Dispatch(FloatType type, F&& f) {
  switch (type) {
    case FloatType::kF32:
      return f(F32{});
    case FloatType::kF16:
      return f(F16{});
    case FloatType::kBF16:
      break;
  }
  return f(BF16{});
}

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_FLOAT_TYPES_H_
