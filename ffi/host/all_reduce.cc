#include "ffi/host/all_reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ffi/host/float_types.h"

namespace b12x::host {
namespace {

// Small enough for the cache, large enough for the compiler's vector loops.
constexpr int64_t kTile = 1024;

template <typename T>
void AddTo(const void* data, int64_t first, int64_t count, float* sum) {
  const auto* values = static_cast<const typename T::Bits*>(data) + first;
  for (int64_t i = 0; i < count; ++i) sum[i] += T::Widen(values[i]);
}

template <typename T>
void RoundTo(const float* sum, int64_t first, int64_t count, void* data) {
  auto* values = static_cast<typename T::Bits*>(data) + first;
  for (int64_t i = 0; i < count; ++i) values[i] = T::Round(sum[i]);
}

template <typename T>
void AllReduceAs(int64_t count, const std::vector<const void*>& inputs,
                 const std::vector<void*>& outputs) {
  std::array<float, kTile> sum;
  for (int64_t first = 0; first < count; first += kTile) {
    const int64_t size = std::min(kTile, count - first);
    // -0 is the sum of no numbers: it keeps the sign of a zero that all ranks agree on.
    std::fill_n(sum.begin(), size, -0.0f);
    for (const void* input : inputs) AddTo<T>(input, first, size, sum.data());
    for (void* output : outputs) RoundTo<T>(sum.data(), first, size, output);
  }
}

template <typename T>
void AllReduceRmsNormAs(int64_t rows, int64_t hidden, float eps,
                        const std::vector<RmsNormBuffers>& ranks) {
  std::vector<float> reduced(hidden);
  std::vector<float> row(hidden);
  std::vector<float> weight(hidden);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = r * hidden;
    std::fill(reduced.begin(), reduced.end(), -0.0f);
    for (const RmsNormBuffers& rank : ranks) AddTo<T>(rank.input, first, hidden, reduced.data());
    for (const RmsNormBuffers& rank : ranks) {
      row = reduced;
      AddTo<T>(rank.residual, first, hidden, row.data());
      RoundTo<T>(row.data(), first, hidden, rank.new_residual);
      std::fill(row.begin(), row.end(), -0.0f);
      AddTo<T>(rank.new_residual, first, hidden, row.data());
      double squares = 0;
      for (const float value : row) squares += static_cast<double>(value) * value;
      const float scale =
          1.0f / std::sqrt(static_cast<float>(squares / static_cast<double>(hidden)) + eps);
      std::fill(weight.begin(), weight.end(), -0.0f);
      AddTo<T>(rank.weight, 0, hidden, weight.data());
      for (int64_t i = 0; i < hidden; ++i) row[i] = row[i] * scale * weight[i];
      RoundTo<T>(row.data(), first, hidden, rank.normed);
    }
  }
}

}  // namespace

int64_t ByteWidth(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

void AllReduce(FloatType type, int64_t count, const std::vector<const void*>& inputs,
               const std::vector<void*>& outputs) {
  Dispatch(type, [&](auto t) { AllReduceAs<decltype(t)>(count, inputs, outputs); });
}

void AllReduceRmsNorm(FloatType type, int64_t rows, int64_t hidden, float eps,
                      const std::vector<RmsNormBuffers>& ranks) {
  Dispatch(type, [&](auto t) { AllReduceRmsNormAs<decltype(t)>(rows, hidden, eps, ranks); });
}

void FillNan(FloatType type, int64_t count, void* data) {
  Dispatch(type, [&](auto t) {
    using T = decltype(t);
    std::fill_n(static_cast<typename T::Bits*>(data), count,
                T::Round(std::numeric_limits<float>::quiet_NaN()));
  });
}

}  // namespace b12x::host
