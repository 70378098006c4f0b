// 16 lanes in one AVX-512 register (F, BW, DQ, VL).
#include <immintrin.h>

namespace b12x::host::B12X_ISA {
namespace {

constexpr int kRegisterDots = 16;  // accumulators of the kernel that decodes in registers
constexpr int kTileRows = 4;       // accumulators of the kernel that works on decoded tiles
constexpr int kTileActivations = 4;
constexpr int kFp4Rows = 16;  // accumulators of the NVFP4 kernel

using F16 = __m512;

inline F16 Zero() { return _mm512_setzero_ps(); }
inline F16 Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(F16 v, float* p) { _mm512_storeu_ps(p, v); }
inline F16 Mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
template <bool is_short>
inline F16 MulAdd(F16 a, F16 b, F16 c) {
  return _mm512_fmadd_ps(a, b, c);
}

// The fixed tree: lanes i and i + 8, i and i + 4, i and i + 2, i and i + 1.
inline float Sum(F16 v) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

// Lanes 0-7 get s[0] and lanes 8-15 get s[1].
inline F16 Halves(const float* s) {
  return _mm512_mask_broadcastss_ps(_mm512_set1_ps(s[0]), 0xff00, _mm_load_ss(s + 1));
}

// Lanes 2 i and 2 i + 1 get s[i].
inline F16 Pairs(const float* s) {
  const __m512i index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(s)));
}

// The E2M1 values of 32 columns, without their scales.
inline void DecodeGroup(const uint8_t* codes, F16* even, F16* odd) {
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m512i bytes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  // The permutation looks at the low four bits of each lane only.
  *even = _mm512_permutexvar_ps(bytes, values);
  *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}

struct Fp4Weights {
  __m512i even, odd;
};

// 2 * e2m1 + 12 of 128 columns, as unsigned bytes.
inline Fp4Weights DecodeFp4(const uint8_t* codes) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i bytes = _mm512_loadu_si512(codes);
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(bytes, nibble)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble))};
}

// Four times the sums of products of e2m1 values in each lane, exact.
inline F16 DotFp4Group(const Fp4Weights& w, const Fp4Group& a) {
  const __m512i even = _mm512_maddubs_epi16(w.even, _mm512_loadu_si512(a.even));
  const __m512i odd = _mm512_maddubs_epi16(w.odd, _mm512_loadu_si512(a.odd));
  const __m512i sums = _mm512_madd_epi16(_mm512_add_epi16(even, odd), _mm512_set1_epi16(1));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_loadu_si512(a.offset)));
}

}  // namespace
}  // namespace b12x::host::B12X_ISA
