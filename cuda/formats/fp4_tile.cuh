// The weight tile that SM90 kernels stream, and how a warp turns it into MMA operands.
//
// A tile is 16 rows x 128 columns of one expert's matrix in 1,152 contiguous bytes: 1,024 bytes of
// E2M1 codes and 128 bytes of block scales. Lane 4 g + t of a warp owns rows g and g + 8 and, of
// each of the four 32-column steps j, the 8 consecutive columns 32 j + 8 t .. + 7: one 32-bit word
// a row and step. A warp's MMA numbers the k of a step so that those 8 columns are what lane t
// holds of both operands; so activations are read 16 bytes at a time in their natural order.
//
//   codes    byte 512 * (j / 2) + 16 * lane + 8 * (row / 8) + 4 * (j % 2)
//   scales   byte 1024 + 8 * (2 * g + t / 2) + 4 * (j / 2), a word for rows g, g + 8 and steps j, j
//   + 1
//
// Bits are spread so that one shift and one mask put a code's sign, exponent and mantissa at bits
// 15, 8..7 and 6, where they are the bf16 number e2m1 * 2^-126 (subnormals included); the low and
// high half of a word hold the even and odd column of a pair. Words of steps j and j + 1 share two
// of their pairs' bits:
//
//   bit (each half)     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//   pairs 0, 1, 2        0  2  2  2  1  x  x  0  0  0  2  1  1  1  x  x       x: 4 bits of pair 3
//
// jax_b12x/moe/layout_sm90.py packs it and says the same in Python.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"

namespace b12x {

inline constexpr int kTileRows = 16;
inline constexpr int kTileColumns = 128;
inline constexpr int kTileCodeBytes = kTileRows * kTileColumns / 2;
inline constexpr int kTileScaleBytes = kTileRows * kTileColumns / 16;
inline constexpr int kTileBytes = kTileCodeBytes + kTileScaleBytes;

enum class ScaleFormat { kE4M3, kE8M0 };

// Where a lane's share of a tile lies, and which scales belong to it. A product with one token
// takes others than the rest: those of the blocks whose sums the lane has in the end.
template <bool kOneToken>
struct TileLane {
  uint32_t words, scales, halves;

  static __device__ __forceinline__ TileLane of(int lane) {
    const uint32_t g = lane >> 2, t = lane & 3;
    const uint32_t row = kTileCodeBytes + 16 * g;
    if constexpr (kOneToken) {
      return {16u * lane, row + 4 * (t >> 1), (t & 1) != 0 ? 0x7632u : 0x5410u};
    } else {
      return {16u * lane, row + 8 * (t >> 1), 0};
    }
  }
};

// A lane's share of a tile.
struct TileRegisters {
  uint4 words[2];  // steps 0, 1 and 2, 3; each row g, then row g + 8
  uint2 scales;    // one token: both of its words in x

  template <bool kOneToken>
  static __device__ __forceinline__ TileRegisters load(uint32_t tile,
                                                       const TileLane<kOneToken>& lane) {
    const uint32_t words = tile + lane.words, scales = tile + lane.scales;
    TileRegisters r{{ptx::load_shared_16(words), ptx::load_shared_16(words + 512)}, {0, 0}};
    if constexpr (kOneToken) {
      const uint32_t first = ptx::load_shared_4(scales), second = ptx::load_shared_4(scales + 8);
      r.scales.x = __byte_perm(first, second, lane.halves);
    } else {
      r.scales = ptx::load_shared_8(scales);
    }
    return r;
  }
};

// kFp16: operands of the product are fp16 rather than bf16.
template <bool kFp16, ScaleFormat kScale>
struct TileMath {
  static_assert(!kFp16 || kScale == ScaleFormat::kE4M3,
                "an E8M0 scale does not fit in fp16: these weights multiply in bf16");

  // What a product of decoded weights must be multiplied by. With E4M3 scales the decoded weight is
  // e2m1 * scale * 2^-8, which is exact in bf16 and in fp16.
  static constexpr float kProductScale = kScale == ScaleFormat::kE4M3 ? 256.0f : 1.0f;

  // Puts codes at bits 15 and 8..6 of each half (shifted there already) into place as numbers.
  static __device__ __forceinline__ uint32_t number(uint32_t shifted) {
    if constexpr (kFp16) {
      // fp16 keeps a code's three low bits at 11..9: e2m1 * 2^-14.
      return (shifted & 0x80008000u) | ((shifted << 3) & 0x0E000E00u);
    } else {
      return shifted & 0x81C081C0u;
    }
  }

  // A row's words of steps j and j + 1 -> their pairs as numbers.
  static __device__ __forceinline__ void decode_words(uint32_t w0, uint32_t w1, uint32_t (&a0)[4],
                                                      uint32_t (&a1)[4]) {
    a0[0] = number(w0);
    a1[0] = number(w1);
    a0[1] = number(w0 << 4);
    a1[1] = number(w1 << 4);
    a0[2] = number(__funnelshift_r(w0, w0, 6));
    a1[2] = number(__funnelshift_r(w1, w1, 6));
    // Bits of pair 3 from w0 where the mask is set, from w1 elsewhere.
    const uint32_t joined = ptx::select_bits(0x06030603u, w0, w1 << 2);
    a0[3] = number(__funnelshift_r(joined, joined, 4));
    a1[3] = number(joined << 6);
  }

  // Numbers times the scale in half kHalf of `scales`.
  template <int kHalf>
  static __device__ __forceinline__ void scale_words(uint32_t (&a)[4], uint32_t scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kScale == ScaleFormat::kE8M0) {
        a[i] = ptx::mul_x2<false>(a[i], 0x7E807E80u);  // * 2^126
      }
      a[i] = ptx::mul_x2_by_half<kFp16, kHalf>(a[i], scales);
    }
  }

  // A word of scales -> rows g and g + 8, each with steps j and j + 1 in its halves. With E4M3 in
  // bf16, times 2^kExponent besides.
  template <int kExponent>
  static __device__ __forceinline__ void decode_scales(uint32_t word, uint32_t& top,
                                                       uint32_t& bottom) {
    constexpr uint32_t kMask = kScale == ScaleFormat::kE4M3 ? 0x07F007F0u : 0x0FF00FF0u;
    top = word & kMask;
    bottom = __byte_perm(word, 0, 0x2301) & kMask;
    if constexpr (kScale == ScaleFormat::kE8M0) {
      top <<= 3;  // bf16 exponent
      bottom <<= 3;
    } else if constexpr (kFp16) {
      top = ptx::mul_x2<true>(top << 3, 0x74007400u);  // scale * 2^-8 * 2^14
      bottom = ptx::mul_x2<true>(bottom << 3, 0x74007400u);
    } else {
      // The bits are scale * 2^-120. 2^238 is no bf16 number, so that 2^119 comes twice.
      static_assert(kExponent == -1 || kExponent == 118);
      top = ptx::mul_x2<false>(top, 0x7B007B00u);
      bottom = ptx::mul_x2<false>(bottom, 0x7B007B00u);
      if constexpr (kExponent == 118) {
        top = ptx::mul_x2<false>(top, 0x7B007B00u);
        bottom = ptx::mul_x2<false>(bottom, 0x7B007B00u);
      }
    }
  }

  // acc[16, 8] += tile[16, 128] * activations[128, 8]; `b[j]` holds this lane's 8 activations of
  // step j (column g of the product). Two accumulators keep the chain of dependent products short.
  static __device__ __forceinline__ void multiply(const TileRegisters& tile, const uint4 (&b)[4],
                                                  float (&acc0)[4], float (&acc1)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = tile.words[half];
      uint32_t top_scale, bottom_scale;
      decode_scales<118>(half == 0 ? tile.scales.x : tile.scales.y, top_scale, bottom_scale);
      uint32_t top0[4], top1[4], bottom0[4], bottom1[4];
      decode_words(words.x, words.y, top0, top1);
      decode_words(words.z, words.w, bottom0, bottom1);
      scale_words<0>(top0, top_scale);
      scale_words<1>(top1, top_scale);
      scale_words<0>(bottom0, bottom_scale);
      scale_words<1>(bottom1, bottom_scale);
      multiply_steps(top0, bottom0, b[2 * half], acc0, acc1);
      multiply_steps(top1, bottom1, b[2 * half + 1], acc0, acc1);
    }
  }

  // The same for a single token, whose products leave seven of eight columns unused: a column for
  // each block of 16 instead, so that four sums a lane are scaled and not 64 weights. `b` comes
  // from one_token_operand(); what is added to `acc` is summed over its columns and multiplied by
  // kOneTokenScale in the end (collapse()).
  static __device__ __forceinline__ void multiply_one_token(const TileRegisters& tile,
                                                            const uint4 (&b)[4], float (&acc)[4]) {
    float sums[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = tile.words[half];
      uint32_t top0[4], top1[4], bottom0[4], bottom1[4];
      decode_words(words.x, words.y, top0, top1);
      decode_words(words.z, words.w, bottom0, bottom1);
      multiply_steps(top0, bottom0, b[2 * half], sums[half], sums[half]);
      multiply_steps(top1, bottom1, b[2 * half + 1], sums[half], sums[half]);
    }
    uint32_t scales[2];
    decode_scales<-1>(tile.scales.x, scales[0], scales[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A column has been added to in one of the two alone.
      acc[i] = __fmaf_rn(__fadd_rn(sums[0][i], sums[1][i]),
                         ptx::half_as_float<kFp16>(scales[i / 2], i % 2), acc[i]);
    }
  }

  // This lane's activations (8 of one step, the one that `step` names) -> operand of
  // multiply_one_token(): zero but for its column. In bf16 they are multiplied by 2^80, since the
  // weights are e2m1 * 2^-126: so activations from 2^-79 to 2^47 lose nothing.
  static __device__ __forceinline__ void one_token_operand(uint4 v, int step, uint4 (&b)[4]) {
    if constexpr (!kFp16) {
      v.x = ptx::mul_x2<false>(v.x, 0x67806780u);
      v.y = ptx::mul_x2<false>(v.y, 0x67806780u);
      v.z = ptx::mul_x2<false>(v.z, 0x67806780u);
      v.w = ptx::mul_x2<false>(v.w, 0x67806780u);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j] = j == step ? v : uint4{0, 0, 0, 0};
      ptx::keep(b[j]);
    }
  }

  // Which of a tile's blocks a lane has activations of for a single token: the column of its
  // operand is the block, if it is one of those that the lane has columns of; its step then is
  // column / 2.
  static __device__ __forceinline__ bool one_token_lane(int lane) {
    return (lane >> 2 & 1) == (lane >> 1 & 1);
  }

  // Sums of a single token, a column for each block -> as multiply() leaves them, of token 0.
  static __device__ __forceinline__ void collapse(float (&acc)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float sum = __fadd_rn(acc[i], acc[i + 1]);
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 2));
      acc[i] = __fmul_rn(sum, kOneTokenScale);
      acc[i + 1] = 0.0f;
    }
  }

 private:
  // Brings the sums of a single token to what those of multiply() are: a power of two. E4M3: e2m1 *
  // 2^-126, scale / 2 and x * 2^80 against e2m1 * scale * 2^-8.
  static constexpr float kOneTokenScale = kFp16                          ? 1.0f
                                          : kScale == ScaleFormat::kE4M3 ? 0x1p39f
                                                                         : 0x1p46f;

  // acc[16, 8] += one step's columns of the tile * b; rows g and g + 8.
  static __device__ __forceinline__ void multiply_steps(const uint32_t (&top)[4],
                                                        const uint32_t (&bottom)[4], uint4 b,
                                                        float (&acc0)[4], float (&acc1)[4]) {
    ptx::mma_m16n8k16<kFp16>(acc0, top[0], bottom[0], top[1], bottom[1], b.x, b.y);
    ptx::mma_m16n8k16<kFp16>(acc1, top[2], bottom[2], top[3], bottom[3], b.z, b.w);
  }
};

}  // namespace b12x
