// Activation rows in the forms that the kernels read, and the conversions to and from them.
#ifndef JAX_B12X_FFI_HOST_ROWS_H_
#define JAX_B12X_FFI_HOST_ROWS_H_

#include <cstdint>

#include "ffi/host/kernels.h"
#include "ffi/host/moe.h"

namespace b12x::host {

int64_t DtypeBytes(Dtype dtype);

// Reads element `index` of an array.
float ReadElement(const void* array, Dtype dtype, int64_t index);

// Writes element `index` of an array, rounded to nearest even.
void WriteElement(float value, Dtype dtype, void* array, int64_t index);

// `value` rounded to `dtype`.
float RoundTo(float value, Dtype dtype);

// Bytes of one activation row of `columns` columns.
int64_t RowBytes(Recipe recipe, int64_t columns);

// Writes 32 columns of a wide row from `group` on; of the last group fewer may exist.
void StoreWide(const float* values, int count, int64_t group, float* row);

// Quantizes the 16 columns of one block to NVFP4 and writes them. Follows jax_b12x.quant.nvfp4 bit
// for bit: the scale is e4m3((amax / 6) / global_scale), an element e2m1(x / (scale *
// global_scale)). `global_scale` is 0 if the tensor's is not usable, see UsableGlobalScale.
void StoreFp4Block(const float* values, float global_scale, int64_t block, Fp4Group* row);

// Writes zeros behind the last block of a row, up to the end of its last group.
void ClearFp4Tail(int64_t columns, Fp4Group* row);

// A global scale, or 0 where it is not positive and finite: the tensor then means zeros.
float UsableGlobalScale(float global_scale);

float Sigmoid(float value);

// Applies the activation, in fp32: `jax_b12x.moe.Activation` says what it is.
float Activate(float gate, float up, const Activation& activation);

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_ROWS_H_
