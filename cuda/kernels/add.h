// The sum of two arrays of 16-bit floats.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/status.h"

namespace b12x {

// out[i] = a[i] + b[i] in fp32, rounded once, for `count` elements, a multiple of 8. All three are
// 16-byte aligned; bfloat16 or, with `fp16`, float16.
LaunchStatus launch_add(const void* a, const void* b, void* out, int64_t count, bool fp16,
                        cudaStream_t stream);

}  // namespace b12x
