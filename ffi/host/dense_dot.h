// Inner products with dense rows of weights. One lane structure, and no instruction that only some
// processors have: the same bits everywhere.
#ifndef JAX_B12X_FFI_HOST_DENSE_DOT_H_
#define JAX_B12X_FFI_HOST_DENSE_DOT_H_

#include <cstdint>

#include "ffi/host/moe.h"

namespace b12x::host {

inline constexpr int kMaxDenseActivations = 64;

// Widens `count` elements of `array` from `first` on. The thread's floating-point mode must not
// flush subnormal numbers.
void Widen(const void* array, Dtype dtype, int64_t first, int64_t count, float* out);

// out[m] = <row, activations[m]> for `count` (at most kMaxDenseActivations) rows of activations,
// `columns` apart. The row is `columns` (a multiple of 16) elements of `weights` from `first` on.
void DotRow(const void* weights, Dtype dtype, int64_t first, int64_t columns,
            const float* activations, int count, float* out);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_DENSE_DOT_H_
