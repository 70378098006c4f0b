// 16 lanes in two AVX2 registers.
#include <immintrin.h>

namespace b12x::host::B12X_ISA {
namespace {

constexpr int kRegisterDots = 4;
constexpr int kTileRows = 2;
constexpr int kTileActivations = 2;
constexpr int kFp4Rows = 4;

struct F16 {
  __m256 lo, hi;
};

inline F16 Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void Store(F16 v, float* p) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline F16 Mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
template <bool is_short>
inline F16 MulAdd(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

// The fixed tree: lanes i and i + 8, i and i + 4, i and i + 2, i and i + 1.
inline float Sum(F16 v) {
  const __m256 s8 = _mm256_add_ps(v.lo, v.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

// Lanes 0-7 get s[0] and lanes 8-15 get s[1].
inline F16 Halves(const float* s) { return {_mm256_broadcast_ss(s), _mm256_broadcast_ss(s + 1)}; }

// Lanes 2 i and 2 i + 1 get s[i].
inline F16 Pairs(const float* s) {
  const __m256 values = _mm256_loadu_ps(s);
  const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  const __m256i high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
  return {_mm256_permutevar8x32_ps(values, low), _mm256_permutevar8x32_ps(values, high)};
}

// The E2M1 values of codes in the low four bits of each lane: a look-up of the magnitude by the low
// three bits, which is all that the permutation looks at, and the sign from the fourth.
inline __m256 Decode(__m256i codes) {
  const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 sign = _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN)));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(values, codes), sign);
}

// The E2M1 values of 32 columns, without their scales.
inline void DecodeGroup(const uint8_t* codes, F16* even, F16* odd) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i lo = _mm256_cvtepu8_epi32(bytes);
  const __m256i hi = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
  *even = {Decode(lo), Decode(hi)};
  *odd = {Decode(_mm256_srli_epi32(lo, 4)), Decode(_mm256_srli_epi32(hi, 4))};
}

struct Fp4Weights {
  __m256i even[2], odd[2];
};

// 2 * e2m1 + 12 of 128 columns, as unsigned bytes.
inline Fp4Weights DecodeFp4(const uint8_t* codes) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i nibble = _mm256_set1_epi8(15);
  Fp4Weights w;
  for (int i = 0; i < 2; ++i) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i));
    w.even[i] = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, nibble));
    w.odd[i] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble));
  }
  return w;
}

inline __m256 DotFp4Half(const Fp4Weights& w, const Fp4Group& a, int i) {
  const auto load = [](const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  };
  const __m256i even = _mm256_maddubs_epi16(w.even[i], load(a.even + 32 * i));
  const __m256i odd = _mm256_maddubs_epi16(w.odd[i], load(a.odd + 32 * i));
  const __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, load(a.offset + 8 * i)));
}

// Four times the sums of products of e2m1 values in each lane, exact.
inline F16 DotFp4Group(const Fp4Weights& w, const Fp4Group& a) {
  return {DotFp4Half(w, a, 0), DotFp4Half(w, a, 1)};
}

}  // namespace
}  // namespace b12x::host::B12X_ISA
