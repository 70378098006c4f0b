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

// A lane's share of a tile.
struct TileRegisters {
  uint4 words[2];  // steps 0, 1 and 2, 3; each row g, then row g + 8
  uint2 scales;

  static __device__ __forceinline__ TileRegisters load(uint32_t tile, int lane) {
    return {{ptx::load_shared_16(tile + 16 * lane), ptx::load_shared_16(tile + 512 + 16 * lane)},
            ptx::load_shared_8(tile + kTileCodeBytes + 8 * (lane >> 1))};
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

  // kHalf: which half of `scales` holds the scale.
  template <int kHalf>
  static __device__ __forceinline__ uint32_t weight(uint32_t shifted, uint32_t scales) {
    uint32_t e2m1 = number(shifted);
    if constexpr (kScale == ScaleFormat::kE8M0) {
      e2m1 = ptx::mul_x2<false>(e2m1, 0x7E807E80u);  // * 2^126
    }
    return ptx::mul_x2_by_half<kFp16, kHalf>(e2m1, scales);
  }

  // A row's words of steps j and j + 1 -> their pairs times their scales.
  static __device__ __forceinline__ void decode_words(uint32_t w0, uint32_t w1, uint32_t scales,
                                                      uint32_t (&a0)[4], uint32_t (&a1)[4]) {
    a0[0] = weight<0>(w0, scales);
    a1[0] = weight<1>(w1, scales);
    a0[1] = weight<0>(w0 << 4, scales);
    a1[1] = weight<1>(w1 << 4, scales);
    a0[2] = weight<0>(__funnelshift_r(w0, w0, 6), scales);
    a1[2] = weight<1>(__funnelshift_r(w1, w1, 6), scales);
    // Bits of pair 3 from w0 where the mask is set, from w1 elsewhere.
    const uint32_t joined = ptx::select_bits(0x06030603u, w0, w1 << 2);
    a0[3] = weight<0>(__funnelshift_r(joined, joined, 4), scales);
    a1[3] = weight<1>(joined << 6, scales);
  }

  // A word of scales -> rows g and g + 8, each with steps j and j + 1 in its halves.
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
      // scale * 2^-120 * 2^119 * 2^119; 2^238 is no bf16 number.
      top = ptx::mul_x2<false>(ptx::mul_x2<false>(top, 0x7B007B00u), 0x7B007B00u);
      bottom = ptx::mul_x2<false>(ptx::mul_x2<false>(bottom, 0x7B007B00u), 0x7B007B00u);
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
      decode_scales(half == 0 ? tile.scales.x : tile.scales.y, top_scale, bottom_scale);
      uint32_t top0[4], top1[4], bottom0[4], bottom1[4];
      decode_words(words.x, words.y, top_scale, top0, top1);
      decode_words(words.z, words.w, bottom_scale, bottom0, bottom1);
      const uint4 b0 = b[2 * half], b1 = b[2 * half + 1];
      ptx::mma_m16n8k16<kFp16>(acc0, top0[0], bottom0[0], top0[1], bottom0[1], b0.x, b0.y);
      ptx::mma_m16n8k16<kFp16>(acc1, top0[2], bottom0[2], top0[3], bottom0[3], b0.z, b0.w);
      ptx::mma_m16n8k16<kFp16>(acc0, top1[0], bottom1[0], top1[1], bottom1[1], b1.x, b1.y);
      ptx::mma_m16n8k16<kFp16>(acc1, top1[2], bottom1[2], top1[3], bottom1[3], b1.z, b1.w);
    }
  }
};

}  // namespace b12x
