#include "ffi/host/add.h"

#include <algorithm>

#include "ffi/host/float_types.h"

namespace b12x::host {
namespace {

constexpr int64_t kChunk = 1 << 14;

template <typename Float>
void AddAs(int64_t count, const void* a_data, const void* b_data, void* out_data,
           const Executor& executor) {
  using Bits = typename Float::Bits;
  const auto* a = static_cast<const Bits*>(a_data);
  const auto* b = static_cast<const Bits*>(b_data);
  auto* out = static_cast<Bits*>(out_data);
  Phase phase;
  phase.num_items = (count + kChunk - 1) / kChunk;
  phase.run = [=](int64_t item) {
    const int64_t end = std::min(count, (item + 1) * kChunk);
    for (int64_t i = item * kChunk; i < end; ++i) {
      out[i] = Float::Round(Float::Widen(a[i]) + Float::Widen(b[i]));
    }
  };
  RunPhases({phase}, executor, executor.num_threads);
}

}  // namespace

void Add(Dtype dtype, int64_t count, const void* a, const void* b, void* out,
         const Executor& executor) {
  switch (dtype) {
    case Dtype::kF32:
      return AddAs<F32>(count, a, b, out, executor);
    case Dtype::kBf16:
      return AddAs<BF16>(count, a, b, out, executor);
    case Dtype::kF16:
      return AddAs<F16>(count, a, b, out, executor);
  }
}

}  // namespace b12x::host
