// The inner products for the instruction set that CMake compiles this file for.
#include "ffi/host/kernels.h"

#define B12X_ISA baseline
// clang-format off: the operations come before the code that uses them
#include "ffi/host/simd_baseline.h"
#include "ffi/host/kernels_impl.h"
// clang-format on
