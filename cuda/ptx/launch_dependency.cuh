// Programmatic dependent launch: the next kernel of a stream may start before this one ends.
#pragma once

namespace b12x::ptx {

// Lets the dependent kernel's CTAs start as soon as there is room for them.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and what it wrote is visible.
__device__ __forceinline__ void wait_for_prior_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace b12x::ptx
