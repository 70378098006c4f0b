// The floating-point mode of the kernels: subnormal numbers are numbers.
#ifndef JAX_B12X_FFI_HOST_FLOAT_MODE_H_
#define JAX_B12X_FFI_HOST_FLOAT_MODE_H_

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace b12x::host {

// Turns flushing of subnormal numbers off, and back to what it was at the end of the scope. XLA
// turns it on in some of its threads and not in others, which would make the result depend on the
// thread that computed it.
class ScopedFloatMode {
 public:
#if defined(__x86_64__)
  ScopedFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushBits); }
  ~ScopedFloatMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushBits = 0x8040;  // flush to zero, denormals are zero
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlushBits));
  }
  ~ScopedFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  static constexpr uint64_t kFlushBits = uint64_t{1} << 24;
  uint64_t saved_;
#else
  ScopedFloatMode() {}
  ~ScopedFloatMode() {}

 private:
#endif
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;
};

}  // namespace b12x::host

#endif  // JAX_B12X_FFI_HOST_FLOAT_MODE_H_
