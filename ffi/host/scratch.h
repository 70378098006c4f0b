// How a call's scratch is laid out; `jax_b12x/moe/geometry_cpu.py` adds up the same parts.
#ifndef JAX_B12X_FFI_HOST_SCRATCH_H_
#define JAX_B12X_FFI_HOST_SCRATCH_H_

#include <cstdint>

#include "ffi/host/moe.h"

namespace b12x::host {

struct Scratch {
  explicit Scratch(const MoeProblem& problem);

  char* x_rows;            // [slab_tokens] activation rows of `hidden` columns
  char* h_rows;            // [slab_tokens * top_k] rows of `intermediate` columns, sorted routes
  float* y;                // [slab_tokens * top_k, hidden], results of the second product by route
  int32_t* sorted_routes;  // [slab_tokens * top_k] routes in the order of their experts
  int32_t* expert_begin;   // [num_experts + 1], where in sorted_routes an expert's routes begin
  int32_t* experts;        // [min(slab_tokens * top_k, num_experts)], those that have routes
  int64_t bytes;
};

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_SCRATCH_H_
