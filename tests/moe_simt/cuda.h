// What the MoE kernels use of CUDA C++, on a CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ffi/host/float_types.h"
#include "tests/moe_simt/simt.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

namespace simt {
struct Index {
  int x;
};
}  // namespace simt
#define threadIdx (simt::Index{simt::Here().thread})
#define blockIdx (simt::Index{simt::Here().block})
#define gridDim (simt::Index{simt::Here().blocks})

using std::isfinite;
using std::isnan;
using std::max;
using std::min;
inline uint32_t min(int a, uint32_t b) { return std::min<uint32_t>(a, b); }
inline uint32_t min(uint32_t a, int b) { return std::min<uint32_t>(a, b); }

inline void __syncwarp() { simt::Lane(0, 0); }
template <typename T>
T __shfl_sync(uint32_t /*mask*/, T value, int lane) {
  return simt::Lane(value, lane);
}
template <typename T>
T __shfl_xor_sync(uint32_t /*mask*/, T value, int lane_mask) {
  return simt::Lane(value, threadIdx.x % simt::kWarp ^ lane_mask);
}
template <typename T>
T __shfl_up_sync(uint32_t /*mask*/, T value, int by) {
  const int lane = threadIdx.x % simt::kWarp;
  return simt::Lane(value, lane >= by ? lane - by : lane);
}
inline uint32_t __ballot_sync(uint32_t /*mask*/, int predicate) {
  const unsigned char truth = predicate != 0;
  const unsigned char* lanes = simt::Exchange(&truth, 1);
  uint32_t bits = 0;
  for (int lane = 0; lane < simt::kWarp; ++lane) {
    bits |= static_cast<uint32_t>(lanes[lane * simt::kLaneBytes]) << lane;
  }
  return bits;
}
inline bool __all_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) == 0xFFFFFFFFu;
}
inline uint32_t atomicOr(uint32_t* at, uint32_t bits) {
  const uint32_t before = *at;
  *at |= bits;
  return before;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> by);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return result;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
// Built without contraction: each is rounded once.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __float2uint_rz(float v) { return static_cast<uint32_t>(v); }

struct __half {
  uint16_t bits;
  __half() = default;
  __half(uint16_t b) : bits(b) {}
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __half2float(__half v) { return b12x::host::F16::Widen(v.bits); }
inline __half __float2half_rn(float v) { return __half(b12x::host::F16::Round(v)); }
inline __half __ushort_as_half(uint16_t bits) { return __half(bits); }
inline uint16_t __half_as_ushort(__half v) { return v.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {b12x::host::BF16::Round(v)}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }

using __nv_fp8_storage_t = uint8_t;
enum { __NV_SATFINITE, __NV_E4M3 };

namespace simt {
inline float FromE4M3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float v = exponent == 0 ? std::ldexp(mantissa / 8.0f, -6)
                          : std::ldexp(1 + mantissa / 8.0f, exponent - 7);
  if ((code & 0x7F) == 0x7F) v = std::nanf("");
  return code & 0x80 ? -v : v;
}
}  // namespace simt

inline uint8_t __nv_cvt_float_to_fp8(float v, int /*saturate*/, int /*format*/) {
  if (std::isnan(v)) return 0x7F;
  uint8_t best = 0;
  for (int code = 1; code < 0x7F; ++code) {
    const float before = std::fabs(simt::FromE4M3(best) - std::fabs(v));
    const float distance = std::fabs(simt::FromE4M3(code) - std::fabs(v));
    if (distance < before || (distance == before && code % 2 == 0)) best = code;
  }
  if (std::fabs(v) >= 448) best = 0x7E;
  return best | (std::signbit(v) ? 0x80 : 0);
}
inline uint16_t __nv_cvt_fp8_to_halfraw(uint8_t code, int /*format*/) {
  return b12x::host::F16::Round(simt::FromE4M3(code));
}
