// 16 lanes in plain C++, which compilers turn into what every x86-64 or arm64 processor has.
namespace b12x::host::B12X_ISA {
namespace {

constexpr int kRegisterDots = 2;
constexpr int kTileRows = 1;
constexpr int kTileActivations = 1;
constexpr int kFp4Rows = 1;

struct F16 {
  float lane[kLanes];
};

// a * b + c, rounded once.
inline float FusedMulAdd(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  // The product is exact in double. The sum is rounded to odd, so that rounding it once more to
  // float gives what one rounding would have (Boldo and Melquiond, 2008).
  const double product = static_cast<double>(a) * b;
  const double addend = c;
  double sum = product + addend;
  const double virtual_addend = sum - product;
  const double error = (product - (sum - virtual_addend)) + (addend - virtual_addend);
  int64_t bits;
  __builtin_memcpy(&bits, &sum, sizeof(bits));
  if ((error > 0 || error < 0) && (bits & 1) == 0) {
    bits += (error > 0) == (sum > 0) ? 1 : -1;
    __builtin_memcpy(&sum, &bits, sizeof(bits));
  }
  return static_cast<float>(sum);
#endif
}

inline F16 Zero() { return {}; }

inline F16 Load(const float* p) {
  F16 v;
  __builtin_memcpy(v.lane, p, sizeof(v.lane));
  return v;
}

inline void Store(const F16& v, float* p) { __builtin_memcpy(p, v.lane, sizeof(v.lane)); }

inline F16 Mul(const F16& a, const F16& b) {
  F16 v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = a.lane[i] * b.lane[i];
  return v;
}

template <bool is_short>
inline F16 MulAdd(const F16& a, const F16& b, const F16& c) {
  F16 v;
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (is_short) {
      v.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];  // the product is exact
    } else {
      v.lane[i] = FusedMulAdd(a.lane[i], b.lane[i], c.lane[i]);
    }
  }
  return v;
}

// The fixed tree: lanes i and i + 8, i and i + 4, i and i + 2, i and i + 1.
inline float Sum(const F16& v) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = v.lane[i] + v.lane[i + 8];
  for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// Lanes 0-7 get s[0] and lanes 8-15 get s[1].
inline F16 Halves(const float* s) {
  F16 v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = s[i / 8];
  return v;
}

// Lanes 2 i and 2 i + 1 get s[i].
inline F16 Pairs(const float* s) {
  F16 v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = s[i / 2];
  return v;
}

// The E2M1 values of 32 columns, without their scales.
inline void DecodeGroup(const uint8_t* codes, F16* even, F16* odd) {
  static const float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int i = 0; i < kLanes; ++i) {
    even->lane[i] = kValues[codes[i] & 15];
    odd->lane[i] = kValues[codes[i] >> 4];
  }
}

struct Fp4Weights {
  int8_t even[64], odd[64];
};

// 2 * e2m1 of 128 columns.
inline Fp4Weights DecodeFp4(const uint8_t* codes) {
  static const int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  Fp4Weights w;
  for (int i = 0; i < 64; ++i) {
    w.even[i] = kValues[codes[i] & 15];
    w.odd[i] = kValues[codes[i] >> 4];
  }
  return w;
}

// Four times the sums of products of e2m1 values in each lane, exact. Nothing is added to the
// weights here, so that `offset` is not needed.
inline F16 DotFp4Group(const Fp4Weights& w, const Fp4Group& a) {
  F16 v;
  for (int lane = 0; lane < kLanes; ++lane) {
    int sum = 0;
    for (int i = 4 * lane; i < 4 * lane + 4; ++i) {
      sum += w.even[i] * a.even[i] + w.odd[i] * a.odd[i];
    }
    v.lane[lane] = static_cast<float>(sum);
  }
  return v;
}

}  // namespace
}  // namespace b12x::host::B12X_ISA
