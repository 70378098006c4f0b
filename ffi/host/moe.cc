// The MoE layer in four phases: prepare the tokens, first product, second product, add the routes.
//
// Routes are sorted by expert, so that a tile of weights is read once for all its tokens. The
// phases differ between implementations in how they are launched only: `fused` runs all four as one
// piece of work, `split` as two, and `dynamic` goes through the tokens in slabs.
#include "ffi/host/moe.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "ffi/host/float_mode.h"
#include "ffi/host/kernels.h"
#include "ffi/host/rows.h"
#include "ffi/host/scratch.h"

namespace b12x::host {
namespace {

// Rows of a tile of the first product, for gate and for up: whole groups and blocks of h.
constexpr int kTile13 = 32;
constexpr int kTile2 = 64;
// Weights that are worth another thread: some microseconds of work.
constexpr int64_t kWeightsPerThread = 1 << 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

DotFn ChooseDot(const MoeProblem& p) {
  const Kernels& kernels = KernelsFor(p.isa);
  if (p.recipe == Recipe::kNvfp4) return kernels.fp4;
  const bool is_short = p.dtype != Dtype::kF32;
  if (p.weight_format == WeightFormat::kMxfp4) {
    return is_short ? kernels.wide_mxfp4_short : kernels.wide_mxfp4;
  }
  return is_short ? kernels.wide_nvfp4_short : kernels.wide_nvfp4;
}

// The tokens [first_token, first_token + num_tokens) of a call.
class Slab {
 public:
  Slab(const MoeProblem& problem, int64_t first_token, int64_t num_tokens)
      : p_(problem),
        scratch_(problem),
        dot_(ChooseDot(problem)),
        first_token_(first_token),
        num_tokens_(num_tokens) {
    SortRoutes();
  }

  std::vector<Phase> FirstPhases() {
    return {{num_tokens_, [this](int64_t token) { PrepareToken(token); }},
            {num_experts_ * Tiles13(), [this](int64_t item) {
               FirstProduct(scratch_.experts[item / Tiles13()], item % Tiles13());
             }}};
  }

  std::vector<Phase> SecondPhases() {
    return {{num_experts_ * Tiles2(),
             [this](int64_t item) {
               SecondProduct(scratch_.experts[item / Tiles2()], item % Tiles2());
             }},
            {num_tokens_, [this](int64_t token) { AddRoutes(token); }}};
  }

  int64_t MaxThreads() const {
    const int64_t weights = num_routes_ * 3 * p_.hidden * p_.intermediate;
    return 1 + weights / kWeightsPerThread;
  }

 private:
  int64_t Tiles13() const { return CeilDiv(p_.intermediate, kTile13); }
  int64_t Tiles2() const { return CeilDiv(p_.hidden, kTile2); }

  // A route is `token * top_k + k`, counted within the slab.
  int32_t ExpertOf(int64_t route) const {
    const int32_t id = p_.topk_ids[first_token_ * p_.top_k + route];
    return id >= 0 && id < p_.num_experts ? id : -1;
  }

  void SortRoutes() {
    int32_t* const begin = scratch_.expert_begin;
    std::fill_n(begin, p_.num_experts + 1, 0);
    const int64_t routes = num_tokens_ * p_.top_k;
    for (int64_t route = 0; route < routes; ++route) {
      const int32_t expert = ExpertOf(route);
      if (expert >= 0) ++begin[expert + 1];
    }
    for (int64_t expert = 0; expert < p_.num_experts; ++expert) {
      if (begin[expert + 1] > 0) scratch_.experts[num_experts_++] = static_cast<int32_t>(expert);
      begin[expert + 1] += begin[expert];
    }
    num_routes_ = begin[p_.num_experts];
    // Placing the routes moves each begin to its end; going backwards keeps the order and leaves
    // begin[e + 1] where expert e begins, one place too far.
    for (int64_t route = routes - 1; route >= 0; --route) {
      const int32_t expert = ExpertOf(route);
      if (expert >= 0) {
        scratch_.sorted_routes[--begin[expert + 1]] = static_cast<int32_t>(route);
      }
    }
    std::copy(begin + 1, begin + p_.num_experts + 1, begin);
    begin[p_.num_experts] = static_cast<int32_t>(num_routes_);
  }

  void PrepareToken(int64_t token) {
    const int64_t first = (first_token_ + token) * p_.hidden;
    char* const row = scratch_.x_rows + token * RowBytes(p_.recipe, p_.hidden);
    const float global_scale = UsableGlobalScale(*p_.w13_input_scale);
    float values[kWideColumns];
    for (int64_t column = 0; column < p_.hidden; column += kWideColumns) {
      const int count = static_cast<int>(std::min<int64_t>(kWideColumns, p_.hidden - column));
      for (int i = 0; i < count; ++i) values[i] = ReadElement(p_.x, p_.dtype, first + column + i);
      StoreColumns(values, count, column, global_scale, row);
    }
    FinishRow(p_.hidden, row);
  }

  // Writes up to 32 columns of an activation row, quantized if the recipe says so.
  void StoreColumns(const float* values, int count, int64_t column, float global_scale, char* row) {
    if (p_.recipe == Recipe::kW4A16) {
      StoreWide(values, count, column / kWideColumns, reinterpret_cast<float*>(row));
      return;
    }
    for (int i = 0; i < count; i += 16) {
      StoreFp4Block(values + i, global_scale, (column + i) / 16, reinterpret_cast<Fp4Group*>(row));
    }
  }

  void FinishRow(int64_t columns, char* row) {
    if (p_.recipe == Recipe::kNvfp4) ClearFp4Tail(columns, reinterpret_cast<Fp4Group*>(row));
  }

  PackedRows Rows13(int32_t expert, int64_t row) const {
    return Rows(p_.w13, p_.w13_scale, expert * 2 * p_.intermediate + row, p_.hidden);
  }

  PackedRows Rows2(int32_t expert, int64_t row) const {
    return Rows(p_.w2, p_.w2_scale, expert * p_.hidden + row, p_.intermediate);
  }

  PackedRows Rows(const uint8_t* codes, const uint8_t* scales, int64_t row, int64_t columns) const {
    const int64_t block = p_.weight_format == WeightFormat::kMxfp4 ? 32 : 16;
    return {codes + row * (columns / 2), scales + row * (columns / block), columns};
  }

  // 32 columns of h for all routes of an expert.
  void FirstProduct(int32_t expert, int64_t tile) {
    const int64_t column = tile * kTile13;
    const int count = static_cast<int>(std::min<int64_t>(kTile13, p_.intermediate - column));
    const int64_t x_bytes = RowBytes(p_.recipe, p_.hidden);
    const int64_t h_bytes = RowBytes(p_.recipe, p_.intermediate);
    const bool quantized = p_.recipe == Recipe::kNvfp4;
    const float x_scale = quantized ? UsableGlobalScale(*p_.w13_input_scale) : 1.0f;
    const float gate_scale = x_scale * p_.w13_global_scale[2 * expert];
    const float up_scale = x_scale * p_.w13_global_scale[2 * expert + 1];
    const float h_scale = UsableGlobalScale(p_.w2_input_scale[expert]);
    const float* const bias =
        p_.w13_bias == nullptr ? nullptr : p_.w13_bias + expert * 2 * p_.intermediate + column;

    const void* rows[kMaxActivations];
    float gate[kMaxActivations][kTile13];
    float up[kMaxActivations][kTile13];
    float h[kTile13];
    ForEachChunk(expert, [&](int64_t begin, int size) {
      for (int m = 0; m < size; ++m) {
        const int64_t token = scratch_.sorted_routes[begin + m] / p_.top_k;
        rows[m] = scratch_.x_rows + token * x_bytes;
      }
      dot_(Rows13(expert, column), count, rows, size, gate[0], kTile13);
      dot_(Rows13(expert, p_.intermediate + column), count, rows, size, up[0], kTile13);
      for (int m = 0; m < size; ++m) {
        for (int i = 0; i < count; ++i) {
          float g = gate[m][i] * gate_scale;
          float u = up[m][i] * up_scale;
          if (bias != nullptr) {
            g += bias[i];
            u += bias[p_.intermediate + i];
          }
          h[i] = Activate(g, u, p_.activation);
          if (!quantized) h[i] = RoundTo(h[i], p_.dtype);
        }
        char* const row = scratch_.h_rows + (begin + m) * h_bytes;
        StoreColumns(h, count, column, h_scale, row);
        if (column + count == p_.intermediate) FinishRow(p_.intermediate, row);
      }
    });
  }

  // 64 columns of y for all routes of an expert.
  void SecondProduct(int32_t expert, int64_t tile) {
    const int64_t column = tile * kTile2;
    const int count = static_cast<int>(std::min<int64_t>(kTile2, p_.hidden - column));
    const int64_t h_bytes = RowBytes(p_.recipe, p_.intermediate);
    const float h_scale =
        p_.recipe == Recipe::kNvfp4 ? UsableGlobalScale(p_.w2_input_scale[expert]) : 1.0f;
    const float scale = h_scale * p_.w2_global_scale[expert];
    const float* const bias =
        p_.w2_bias == nullptr ? nullptr : p_.w2_bias + expert * p_.hidden + column;

    const void* rows[kMaxActivations];
    float sums[kMaxActivations][kTile2];
    ForEachChunk(expert, [&](int64_t begin, int size) {
      for (int m = 0; m < size; ++m) rows[m] = scratch_.h_rows + (begin + m) * h_bytes;
      dot_(Rows2(expert, column), count, rows, size, sums[0], kTile2);
      for (int m = 0; m < size; ++m) {
        const int64_t route = scratch_.sorted_routes[begin + m];
        float* const y = scratch_.y + route * p_.hidden + column;
        for (int i = 0; i < count; ++i) {
          y[i] = sums[m][i] * scale;
          if (bias != nullptr) y[i] += bias[i];
        }
      }
    });
  }

  void AddRoutes(int64_t token) {
    constexpr int kColumns = 256;
    const int64_t first_route = token * p_.top_k;
    const float* const weights = p_.topk_weights + first_token_ * p_.top_k;
    for (int64_t column = 0; column < p_.hidden; column += kColumns) {
      const int count = static_cast<int>(std::min<int64_t>(kColumns, p_.hidden - column));
      float sum[kColumns] = {};
      for (int64_t route = first_route; route < first_route + p_.top_k; ++route) {
        if (ExpertOf(route) < 0) continue;
        const float* const y = scratch_.y + route * p_.hidden + column;
        for (int i = 0; i < count; ++i) sum[i] += weights[route] * y[i];
      }
      const int64_t first = (first_token_ + token) * p_.hidden + column;
      for (int i = 0; i < count; ++i) WriteElement(sum[i], p_.dtype, p_.out, first + i);
    }
  }

  // Calls `run(begin, size)` for an expert's sorted routes, a bounded number at a time.
  template <typename Run>
  void ForEachChunk(int32_t expert, const Run& run) const {
    const int64_t end = scratch_.expert_begin[expert + 1];
    for (int64_t begin = scratch_.expert_begin[expert]; begin < end; begin += kMaxActivations) {
      run(begin, static_cast<int>(std::min<int64_t>(kMaxActivations, end - begin)));
    }
  }

  const MoeProblem& p_;
  Scratch scratch_;
  DotFn dot_;
  int64_t first_token_;
  int64_t num_tokens_;
  int64_t num_experts_ = 0;  // that have routes
  int64_t num_routes_ = 0;
};

}  // namespace

const Kernels& KernelsFor(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::kKernels;
  if (isa == Isa::kAvx2) return avx2::kKernels;
#endif
  static_cast<void>(isa);
  return baseline::kKernels;
}

void RunMoe(const MoeProblem& problem, const Executor& executor) {
  const bool is_split = problem.implementation == Implementation::kSplit;
  for (int64_t token = 0; token < problem.num_tokens; token += problem.slab_tokens) {
    Slab slab(problem, token, std::min(problem.slab_tokens, problem.num_tokens - token));
    std::vector<Phase> phases = slab.FirstPhases();
    if (is_split) {
      RunPhases(std::move(phases), executor, slab.MaxThreads());
      phases.clear();
    }
    for (Phase& phase : slab.SecondPhases()) phases.push_back(std::move(phase));
    RunPhases(std::move(phases), executor, slab.MaxThreads());
  }
}

}  // namespace b12x::host
