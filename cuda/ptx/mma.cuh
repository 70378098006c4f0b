// Warp-level matrix products with 16-bit operands and fp32 accumulation.
#pragma once

#include <cstdint>

namespace b12x::ptx {

// D[16, 8] += A[16, 16] * B[16, 8]. Lane 4 g + t holds rows g and g + 8 of A and D and column g of
// B.
template <bool kFp16>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kFp16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Two products of 16-bit floats at once.
template <bool kFp16>
__device__ __forceinline__ uint32_t mul_x2(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (kFp16) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

// Both halves of `a` times one half of `b`.
template <bool kFp16, int kHalf>
__device__ __forceinline__ uint32_t mul_x2_by_half(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (kFp16) {
    if constexpr (kHalf == 0) {
      asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.f16x2 %0, "
          "%1, s;}"
          : "=r"(d)
          : "r"(a), "r"(b));
    } else {
      asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.f16x2 %0, "
          "%1, s;}"
          : "=r"(d)
          : "r"(a), "r"(b));
    }
  } else {
    if constexpr (kHalf == 0) {
      asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.bf16x2 %0, "
          "%1, s;}"
          : "=r"(d)
          : "r"(a), "r"(b));
    } else {
      asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.bf16x2 %0, "
          "%1, s;}"
          : "=r"(d)
          : "r"(a), "r"(b));
    }
  }
  return d;
}

// One of two 16-bit floats, the one in the high half where `high` is set.
template <bool kFp16>
__device__ __forceinline__ float half_as_float(uint32_t pair, int high) {
  if constexpr (kFp16) {
    float v;
    if (high != 0) {
      asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(pair));
    } else {
      asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(v) : "r"(pair));
    }
    return v;
  } else {
    return __uint_as_float(high != 0 ? pair & 0xFFFF0000u : pair << 16);
  }
}

// mask ? a : b, bit by bit.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}

}  // namespace b12x::ptx
