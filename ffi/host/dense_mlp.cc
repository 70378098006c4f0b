// The dense MLP in three phases, 64 tokens at a time: widen the tokens, first product, second
// product.
#include "ffi/host/dense_mlp.h"

#include <algorithm>
#include <vector>

#include "ffi/host/dense_dot.h"
#include "ffi/host/rows.h"

namespace b12x::host {
namespace {

constexpr int64_t kTile = 16;  // rows of an item of work
// Weights that are worth another thread: some microseconds of work.
constexpr int64_t kWeightsPerThread = 1 << 16;

int64_t SlabTokens(const DenseMlpProblem& p) {
  return std::min<int64_t>(p.num_tokens, kMaxDenseActivations);
}

// The tokens [first_token, first_token + num_tokens) of a call.
class Slab {
 public:
  Slab(const DenseMlpProblem& problem, int64_t first_token)
      : p_(problem),
        first_token_(first_token),
        num_tokens_(std::min<int64_t>(kMaxDenseActivations, problem.num_tokens - first_token)),
        x_(static_cast<float*>(problem.scratch)),
        h_(x_ + SlabTokens(problem) * problem.hidden),
        gates_(h_ + SlabTokens(problem) * problem.intermediate) {}

  std::vector<Phase> Phases() {
    return {{num_tokens_, [this](int64_t token) { PrepareToken(token); }},
            {p_.intermediate / kTile, [this](int64_t tile) { FirstProduct(tile * kTile); }},
            {p_.hidden / kTile, [this](int64_t tile) { SecondProduct(tile * kTile); }}};
  }

  int64_t MaxThreads() const {
    return 1 + num_tokens_ * 3 * p_.hidden * p_.intermediate / kWeightsPerThread;
  }

 private:
  void PrepareToken(int64_t token) {
    float* const row = x_ + token * p_.hidden;
    Widen(p_.x, p_.dtype, (first_token_ + token) * p_.hidden, p_.hidden, row);
    gates_[token] = 1.0f;
    if (p_.shared_gate != nullptr) {
      float logit;
      DotRow(p_.shared_gate, p_.dtype, 0, p_.hidden, row, 1, &logit);
      gates_[token] = Sigmoid(logit);
    }
  }

  void FirstProduct(int64_t first_row) {
    const int count = static_cast<int>(num_tokens_);
    float gate[kMaxDenseActivations];
    float up[kMaxDenseActivations];
    for (int64_t row = first_row; row < first_row + kTile; ++row) {
      DotRow(p_.w13, p_.dtype, row * p_.hidden, p_.hidden, x_, count, gate);
      DotRow(p_.w13, p_.dtype, (p_.intermediate + row) * p_.hidden, p_.hidden, x_, count, up);
      for (int m = 0; m < count; ++m) {
        if (p_.w13_bias != nullptr) {
          gate[m] += p_.w13_bias[row];
          up[m] += p_.w13_bias[p_.intermediate + row];
        }
        h_[m * p_.intermediate + row] = RoundTo(Activate(gate[m], up[m], p_.activation), p_.dtype);
      }
    }
  }

  void SecondProduct(int64_t first_row) {
    const int count = static_cast<int>(num_tokens_);
    float y[kMaxDenseActivations];
    for (int64_t row = first_row; row < first_row + kTile; ++row) {
      DotRow(p_.w2, p_.dtype, row * p_.intermediate, p_.intermediate, h_, count, y);
      for (int m = 0; m < count; ++m) {
        if (p_.w2_bias != nullptr) y[m] += p_.w2_bias[row];
        if (p_.shared_gate != nullptr) y[m] *= gates_[m];
        WriteElement(y[m], p_.dtype, p_.out, (first_token_ + m) * p_.hidden + row);
      }
    }
  }

  const DenseMlpProblem& p_;
  int64_t first_token_;
  int64_t num_tokens_;
  float* x_;      // [num_tokens, hidden]
  float* h_;      // [num_tokens, intermediate]
  float* gates_;  // [num_tokens]
};

}  // namespace

int64_t DenseMlpScratchBytes(const DenseMlpProblem& problem) {
  return SlabTokens(problem) * (problem.hidden + problem.intermediate + 1) *
         static_cast<int64_t>(sizeof(float));
}

void RunDenseMlp(const DenseMlpProblem& problem, const Executor& executor) {
  for (int64_t token = 0; token < problem.num_tokens; token += kMaxDenseActivations) {
    Slab slab(problem, token);
    RunPhases(slab.Phases(), executor, slab.MaxThreads());
  }
}

}  // namespace b12x::host
