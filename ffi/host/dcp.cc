#include "ffi/host/dcp.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "ffi/host/float_mode.h"

namespace b12x::host {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Writes each rank's weight, 0 for empty shards, and returns the combined LSE.
float Weigh(const std::vector<float>& lses, bool base_two, std::vector<float>* weights) {
  float highest = kMinusInfinity;
  for (const float lse : lses) {
    if (std::isfinite(lse)) highest = std::max(highest, lse);
  }
  std::fill(weights->begin(), weights->end(), 0.0f);
  if (highest == kMinusInfinity) return kMinusInfinity;
  float total = 0.0f;
  for (size_t rank = 0; rank < lses.size(); ++rank) {
    if (!std::isfinite(lses[rank])) continue;
    const float distance = lses[rank] - highest;
    (*weights)[rank] = base_two ? std::exp2(distance) : std::exp(distance);
    total += (*weights)[rank];
  }
  for (float& weight : *weights) weight /= total;
  return highest + (base_two ? std::log2(total) : std::log(total));
}

template <typename T>
void CombineAs(const comm::HeadRows& rows, int64_t head_dim, bool base_two,
               const std::vector<CombineBuffers>& ranks) {
  using Bits = typename T::Bits;
  std::vector<float> lses(ranks.size());
  std::vector<float> weights(ranks.size());
  std::vector<float> sum(head_dim);
  for (size_t owner = 0; owner < ranks.size(); ++owner) {
    for (int64_t row = 0; row < rows.count(); ++row) {
      const int64_t in_whole = rows.InWhole(row, static_cast<int>(owner));
      for (size_t rank = 0; rank < ranks.size(); ++rank) lses[rank] = ranks[rank].lse[in_whole];
      const float lse = Weigh(lses, base_two, &weights);
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        if (!std::isfinite(lses[rank])) continue;
        const Bits* partial = static_cast<const Bits*>(ranks[rank].partial) + in_whole * head_dim;
        const float weight = weights[rank];
        for (int64_t i = 0; i < head_dim; ++i) sum[i] += weight * T::Widen(partial[i]);
      }
      Bits* out = static_cast<Bits*>(ranks[owner].out) + row * head_dim;
      for (int64_t i = 0; i < head_dim; ++i) out[i] = T::Round(sum[i]);
      if (ranks[owner].out_lse != nullptr) ranks[owner].out_lse[row] = lse;
    }
  }
}

}  // namespace

void DcpCombine(FloatType type, const comm::HeadRows& rows, int64_t head_dim, bool base_two,
                const std::vector<CombineBuffers>& ranks) {
  const ScopedFloatMode float_mode;
  Dispatch(type, [&](auto t) { CombineAs<decltype(t)>(rows, head_dim, base_two, ranks); });
}

void DcpGather(int64_t outer, int64_t row_bytes, const std::vector<GatherBuffers>& ranks) {
  const auto world_size = static_cast<int64_t>(ranks.size());
  for (const GatherBuffers& reader : ranks) {
    auto* whole = static_cast<std::byte*>(reader.whole);
    for (int64_t row = 0; row < outer; ++row) {
      for (int64_t source = 0; source < world_size; ++source) {
        const auto* part = static_cast<const std::byte*>(ranks[source].part) + row * row_bytes;
        std::memcpy(whole + (row * world_size + source) * row_bytes, part, row_bytes);
      }
    }
  }
}

void FillNanBytes(int64_t bytes, void* data) { std::memset(data, 0xFF, bytes); }

}  // namespace b12x::host
