// 16 lanes in vectors of 4, which every x86-64 and arm64 processor has.
namespace b12x::host::B12X_ISA {
namespace {

constexpr int kRegisterDots = 2;
constexpr int kTileRows = 2;
constexpr int kTileActivations = 1;
constexpr int kFp4Rows = 1;

// The compilers' vector types: arithmetic on them is arithmetic on each lane.
using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));
using Short8 = int16_t __attribute__((vector_size(16)));
using Byte8 = int8_t __attribute__((vector_size(8)));

struct F16 {
  F4 v[4];
};

template <typename Vector>
inline Vector LoadVector(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline F4 Splat(float value) { return F4{value, value, value, value}; }

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
  return {
      {LoadVector<F4>(p), LoadVector<F4>(p + 4), LoadVector<F4>(p + 8), LoadVector<F4>(p + 12)}};
}

inline void Store(const F16& a, float* p) { __builtin_memcpy(p, a.v, sizeof(a.v)); }

inline F16 Mul(const F16& a, const F16& b) {
  return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}};
}

template <bool is_short>
inline F16 MulAdd(const F16& a, const F16& b, const F16& c) {
  if constexpr (is_short) {  // the products are exact
    return {{a.v[0] * b.v[0] + c.v[0], a.v[1] * b.v[1] + c.v[1], a.v[2] * b.v[2] + c.v[2],
             a.v[3] * b.v[3] + c.v[3]}};
  } else {
    F16 sum;
    B12X_UNROLL for (int i = 0; i < 4; ++i) {
      B12X_UNROLL for (int j = 0; j < 4; ++j) {
        sum.v[i][j] = FusedMulAdd(a.v[i][j], b.v[i][j], c.v[i][j]);
      }
    }
    return sum;
  }
}

// The fixed tree: lanes i and i + 8, i and i + 4, i and i + 2, i and i + 1.
inline float Sum(const F16& a) {
  const F4 s = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// Lanes 0-7 get s[0] and lanes 8-15 get s[1].
inline F16 Halves(const float* s) {
  const F4 low = Splat(s[0]);
  const F4 high = Splat(s[1]);
  return {{low, low, high, high}};
}

// Lanes 2 i and 2 i + 1 get s[i].
inline F16 Pairs(const float* s) {
  return {{F4{s[0], s[0], s[1], s[1]}, F4{s[2], s[2], s[3], s[3]}, F4{s[4], s[4], s[5], s[5]},
           F4{s[6], s[6], s[7], s[7]}}};
}

// The E2M1 values of 32 columns, without their scales.
inline void DecodeGroup(const uint8_t* codes, F16* even, F16* odd) {
  static const float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  B12X_UNROLL for (int i = 0; i < 4; ++i) {
    const uint8_t* c = codes + 4 * i;
    even->v[i] = F4{kValues[c[0] & 15], kValues[c[1] & 15], kValues[c[2] & 15], kValues[c[3] & 15]};
    odd->v[i] = F4{kValues[c[0] >> 4], kValues[c[1] >> 4], kValues[c[2] >> 4], kValues[c[3] >> 4]};
  }
}

struct Fp4Weights {
  int16_t even[64], odd[64];
};

// 2 * e2m1 of 128 columns.
inline Fp4Weights DecodeFp4(const uint8_t* codes) {
  static const int16_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  Fp4Weights w;
  for (int i = 0; i < 64; ++i) {
    w.even[i] = kValues[codes[i] & 15];
    w.odd[i] = kValues[codes[i] >> 4];
  }
  return w;
}

// Sums of an even and an odd column's product: at most 2 * 144.
inline Short8 Products(const Fp4Weights& w, const Fp4Group& a, int column) {
  return __builtin_convertvector(LoadVector<Byte8>(a.even + column), Short8) *
             LoadVector<Short8>(w.even + column) +
         __builtin_convertvector(LoadVector<Byte8>(a.odd + column), Short8) *
             LoadVector<Short8>(w.odd + column);
}

inline I4 SumPairs(Short8 v) {
  I4 pairs;
  __builtin_memcpy(&pairs, &v, sizeof(pairs));
  return ((pairs << 16) >> 16) + (pairs >> 16);
}

// Four times the sums of products of e2m1 values in each lane, exact. Nothing is added to the
// weights here, so that `offset` is not needed.
inline F16 DotFp4Group(const Fp4Weights& w, const Fp4Group& a) {
  F16 sum;
  B12X_UNROLL for (int i = 0; i < 4; ++i) {
    const int column = 16 * i;
    const I4 low = SumPairs(Products(w, a, column));
    const I4 high = SumPairs(Products(w, a, column + 8));
    const I4 lanes = {low[0] + low[1], low[2] + low[3], high[0] + high[1], high[2] + high[3]};
    sum.v[i] = __builtin_convertvector(lanes, F4);
  }
  return sum;
}

}  // namespace
}  // namespace b12x::host::B12X_ISA
