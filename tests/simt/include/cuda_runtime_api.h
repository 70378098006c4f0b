// What CUDA kernels and their launchers need of CUDA, on a CPU: a thread of a kernel is a fiber,
// and all kernels that were launched run in turns. tests/simt/translate.py makes C++ of a CUDA
// source.
#ifndef JAX_B12X_TESTS_SIMT_CUDA_RUNTIME_API_H_
#define JAX_B12X_TESTS_SIMT_CUDA_RUNTIME_API_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace simt {

struct Index {
  int x;
};
struct Place {
  Index thread, block, block_dim, grid_dim;
};
// Of the thread that runs.
const Place& Here();

inline constexpr int kWarp = 32;
inline constexpr size_t kLaneBytes = 16;

// Lets other threads run.
void Yield();
void SyncThreads();
// Waits for the warp; returns what its lanes brought, each kLaneBytes apart.
const unsigned char* Exchange(const void* value, size_t bytes);
// Memory of the block, the same for each `name`.
void* Shared(const char* name, size_t bytes);
void Launch(std::function<void()> kernel, unsigned blocks, unsigned threads, int stream);
// A clock that goes on whenever it is read.
unsigned long long Clock();

template <typename T>
T Lane(const T& value, int lane) {
  T result;
  std::memcpy(&result, Exchange(&value, sizeof(T)) + lane * kLaneBytes, sizeof(T));
  return result;
}

}  // namespace simt

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define threadIdx (simt::Here().thread)
#define blockIdx (simt::Here().block)
#define blockDim (simt::Here().block_dim)
#define gridDim (simt::Here().grid_dim)

using std::isfinite;
using std::max;
using std::min;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline void __syncthreads() { simt::SyncThreads(); }
inline void __syncwarp() { simt::Lane(0, 0); }
inline void __threadfence_system() {}
template <typename T>
T __shfl_sync(uint32_t /*mask*/, T value, int lane) {
  return simt::Lane(value, lane);
}
template <typename T>
T __shfl_xor_sync(uint32_t /*mask*/, T value, int lane_mask) {
  return simt::Lane(value, threadIdx.x % simt::kWarp ^ lane_mask);
}
inline uint32_t __ballot_sync(uint32_t /*mask*/, int predicate) {
  const unsigned char truth = predicate != 0;
  const unsigned char* lanes = simt::Exchange(&truth, 1);
  uint32_t bits = 0;
  for (int lane = 0; lane < simt::kWarp; ++lane) {
    bits |= static_cast<uint32_t>(lanes[lane * simt::kLaneBytes]) << lane;
  }
  return bits;
}
inline int __all_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) == 0xFFFFFFFFu;
}
inline uint32_t atomicOr(uint32_t* at, uint32_t bits) {
  const uint32_t before = *at;
  *at |= bits;
  return before;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }

using cudaError_t = int;
using cudaStream_t = int;
inline constexpr int cudaSuccess = 0;
inline constexpr int cudaErrorInvalidValue = 1;
inline constexpr int cudaMemcpyHostToDevice = 1;
inline constexpr int cudaMemcpyDeviceToHost = 2;
inline constexpr unsigned cudaHostAllocMapped = 2;
inline constexpr unsigned cudaStreamNonBlocking = 1;

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  *memory = static_cast<T*>(std::aligned_alloc(256, (bytes + 256) / 256 * 256));
  return *memory == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
template <typename T>
cudaError_t cudaHostAlloc(T** memory, size_t bytes, unsigned /*flags*/) {
  return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int /*kind*/) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
// Runs everything that was launched.
cudaError_t cudaDeviceSynchronize();

#endif  // JAX_B12X_TESTS_SIMT_CUDA_RUNTIME_API_H_
