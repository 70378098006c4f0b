// The inner products, the only code that is compiled once for each instruction set.
//
// One lane structure holds everywhere, so that every instruction set gives the same bits: a row's
// products go to 16 partial sums by their column, which are added in a fixed tree.
#ifndef JAX_B12X_FFI_HOST_KERNELS_H_
#define JAX_B12X_FFI_HOST_KERNELS_H_

#include <cstdint>

#include "ffi/host/isa.h"

namespace b12x::host {

inline constexpr int kLanes = 16;

#define B12X_UNROLL _Pragma("GCC unroll 16")

// Activations in fp32: groups of 32 columns, the 16 even columns before the 16 odd ones, as a
// byte of weights has an even column in its low nibble and an odd one in its high nibble. The last
// group is filled up with zeros.
inline constexpr int kWideColumns = 32;

// Activations in NVFP4: groups of 128 columns. Integers are twice the E2M1 values. The last group
// is filled up with zeros.
inline constexpr int kFp4Columns = 128;
struct Fp4Group {
  int8_t even[64];  // of columns 0, 2, ...
  int8_t odd[64];   // of columns 1, 3, ...
  // Of the 8 columns of each lane (even[4 * lane ...] and odd[4 * lane ...]): 12 times the sum,
  // which takes back that weights are multiplied as 2 * e2m1 + 12, and the block scale / 4.
  int32_t offset[kLanes];
  float scale[kLanes];
};
static_assert(sizeof(Fp4Group) == 2 * kFp4Columns);

// Rows of a packed matrix: codes `[rows, columns / 2]` and scales `[rows, columns / block]`.
struct PackedRows {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  int64_t columns = 0;
};

inline constexpr int kRowStep = 4;
inline constexpr int kMaxActivations = 64;

// For each of `num_rows` rows and `count` activation rows: out[m * stride + r] = <w[r], a[m]>, with
// the block scales and without the global ones. `num_rows` is a multiple of kRowStep and `count` at
// most kMaxActivations.
using DotFn = void (*)(const PackedRows& weights, int num_rows, const void* const* activations,
                       int count, float* out, int64_t stride);

struct Kernels {
  // fp32 activations. `short` says that they have at most 11 significant bits, so that products
  // are exact and a processor without fused multiply-add need not emulate one.
  DotFn wide_nvfp4;
  DotFn wide_nvfp4_short;
  DotFn wide_mxfp4;
  DotFn wide_mxfp4_short;
  // NVFP4 activations (arrays of Fp4Group) and weights.
  DotFn fp4;
};

// The kernels for a usable instruction set.
const Kernels& KernelsFor(Isa isa);

namespace baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

// Values of the block scales by their byte.
extern const float kE4m3Values[256];
extern const float kE8m0Values[256];

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_KERNELS_H_
