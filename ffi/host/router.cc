// The router in three phases, 64 tokens at a time: widen the tokens, logits, choice.
#include "ffi/host/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ffi/host/dense_dot.h"
#include "ffi/host/rows.h"

namespace b12x::host {
namespace {

constexpr int64_t kTile = 4;  // experts of an item of work
// Weights that are worth another thread: some microseconds of work.
constexpr int64_t kWeightsPerThread = 1 << 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

int64_t SlabTokens(const RouterProblem& p) {
  return std::min<int64_t>(p.num_tokens, kMaxDenseActivations);
}

// Numbers in the order of the floats that they stand for; 0 is below all of them.
constexpr uint32_t kTaken = 0;

uint32_t Key(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

float FromKey(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Takes the largest of `count` keys, the first of equals.
int64_t Take(uint32_t* keys, int64_t count) {
  const int64_t best = std::max_element(keys, keys + count) - keys;
  keys[best] = kTaken;
  return best;
}

// Chooses the experts of one token. `keys` is scratch for two numbers an expert.
class Choice {
 public:
  Choice(const RouterProblem& problem, int64_t token, uint32_t* keys)
      : p_(problem),
        logits_(problem.logits + token * problem.num_experts),
        ids_(problem.topk_ids + token * (problem.top_k + problem.num_joined)),
        weights_(problem.topk_weights + token * (problem.top_k + problem.num_joined)),
        keys_(keys) {}

  void WritePadding() {
    std::fill_n(ids_, p_.top_k, -1);
    std::fill_n(weights_, p_.top_k, 0.0f);
  }

  // Padding as well goes to the joined experts.
  void WriteJoined() {
    for (int64_t j = 0; j < p_.num_joined; ++j) {
      ids_[p_.top_k + j] = static_cast<int32_t>(p_.num_experts + j);
      weights_[p_.top_k + j] = 1.0f;
    }
  }

  void Write() {
    nan_ = std::any_of(logits_, logits_ + p_.num_experts, [](float v) { return std::isnan(v); });
    if (p_.scoring == Scoring::kSoftmax) {
      for (int64_t e = 0; e < p_.num_experts; ++e) keys_[e] = Key(Logit(e));
    } else {
      ScoreWithBias();
      if (p_.topk_groups < p_.num_groups) LeaveOutGroups();
    }
    for (int64_t k = 0; k < p_.top_k; ++k) {
      ids_[k] = static_cast<int32_t>(Take(keys_, p_.num_experts));
    }
    if (p_.scoring == Scoring::kSoftmax) {
      WeighBySoftmax();
    } else {
      WeighBySigmoid();
    }
    for (int64_t k = 0; k < p_.top_k; ++k) weights_[k] = nan_ ? kNan : weights_[k] * p_.scale;
  }

 private:
  // Finite and without -0.
  float Logit(int64_t expert) const {
    constexpr float kLargest = std::numeric_limits<float>::max();
    return nan_ ? 0.0f : std::clamp(logits_[expert], -kLargest, kLargest) + 0.0f;
  }

  void ScoreWithBias() {
    for (int64_t e = 0; e < p_.num_experts; ++e) {
      const float score = Sigmoid(Logit(e)) + (p_.bias == nullptr ? 0.0f : p_.bias[e]);
      nan_ |= std::isnan(score);
      keys_[e] = Key(score);
    }
    if (nan_) std::fill_n(keys_, p_.num_experts, Key(0.0f));
  }

  // Gives -inf to the experts of all but the best groups.
  void LeaveOutGroups() {
    const int64_t size = p_.num_experts / p_.num_groups;
    uint32_t* const groups = keys_ + p_.num_experts;
    for (int64_t g = 0; g < p_.num_groups; ++g) {
      uint32_t first = kTaken;
      uint32_t second = kTaken;
      for (const uint32_t* key = keys_ + g * size; key < keys_ + (g + 1) * size; ++key) {
        second = std::max(second, std::min(first, *key));
        first = std::max(first, *key);
      }
      groups[g] = Key(size == 1 ? FromKey(first) : FromKey(first) + FromKey(second));
    }
    for (int64_t g = 0; g < p_.topk_groups; ++g) Take(groups, p_.num_groups);
    for (int64_t g = 0; g < p_.num_groups; ++g) {
      if (groups[g] != kTaken) std::fill_n(keys_ + g * size, size, Key(-kInfinity));
    }
  }

  void WeighBySoftmax() {
    const float largest = Logit(ids_[0]);
    float total = 0;
    for (int64_t k = 0; k < p_.top_k; ++k) {
      weights_[k] = std::exp(Logit(ids_[k]) - largest);
      total += weights_[k];
    }
    if (!p_.renormalize) {
      total = 0;
      for (int64_t e = 0; e < p_.num_experts; ++e) total += std::exp(Logit(e) - largest);
    }
    for (int64_t k = 0; k < p_.top_k; ++k) weights_[k] /= total;
  }

  void WeighBySigmoid() {
    float total = 0;
    for (int64_t k = 0; k < p_.top_k; ++k) {
      weights_[k] = Sigmoid(Logit(ids_[k]));
      total += weights_[k];
    }
    if (!p_.renormalize) return;
    for (int64_t k = 0; k < p_.top_k; ++k) weights_[k] /= total + 1e-20f;
  }

  const RouterProblem& p_;
  const float* logits_;
  int32_t* ids_;
  float* weights_;
  uint32_t* keys_;
  bool nan_ = false;
};

// The tokens [first_token, first_token + num_tokens) of a call.
class Slab {
 public:
  Slab(const RouterProblem& problem, int64_t first_token)
      : p_(problem),
        first_token_(first_token),
        num_tokens_(std::min<int64_t>(kMaxDenseActivations, problem.num_tokens - first_token)),
        x_(static_cast<float*>(problem.scratch)),
        keys_(reinterpret_cast<uint32_t*>(x_ + SlabTokens(problem) * problem.hidden)) {}

  std::vector<Phase> Phases() {
    return {{num_tokens_,
             [this](int64_t token) {
               Widen(p_.x, p_.x_dtype, (first_token_ + token) * p_.hidden, p_.hidden,
                     x_ + token * p_.hidden);
             }},
            {(p_.num_experts + kTile - 1) / kTile, [this](int64_t tile) { Logits(tile * kTile); }},
            {num_tokens_, [this](int64_t token) { Choose(token); }}};
  }

  int64_t MaxThreads() const {
    return 1 + num_tokens_ * p_.hidden * p_.num_experts / kWeightsPerThread;
  }

 private:
  void Logits(int64_t first_expert) {
    const int64_t end = std::min(first_expert + kTile, p_.num_experts);
    float sums[kMaxDenseActivations];
    for (int64_t expert = first_expert; expert < end; ++expert) {
      DotRow(p_.weight, p_.weight_dtype, expert * p_.hidden, p_.hidden, x_,
             static_cast<int>(num_tokens_), sums);
      const bool biased = p_.scoring == Scoring::kSoftmax && p_.bias != nullptr;
      for (int64_t m = 0; m < num_tokens_; ++m) {
        p_.logits[(first_token_ + m) * p_.num_experts + expert] =
            biased ? sums[m] + p_.bias[expert] : sums[m];
      }
    }
  }

  void Choose(int64_t token) {
    Choice choice(p_, first_token_ + token, keys_ + token * 2 * p_.num_experts);
    if (p_.token_mask != nullptr && p_.token_mask[first_token_ + token] == 0) {
      choice.WritePadding();
    } else {
      choice.Write();
    }
    choice.WriteJoined();
  }

  const RouterProblem& p_;
  int64_t first_token_;
  int64_t num_tokens_;
  float* x_;        // [num_tokens, hidden]
  uint32_t* keys_;  // [num_tokens, 2, num_experts]
};

}  // namespace

int64_t RouterScratchBytes(const RouterProblem& problem) {
  return SlabTokens(problem) * (problem.hidden + 2 * problem.num_experts) *
         static_cast<int64_t>(sizeof(float));
}

void RunRouter(const RouterProblem& problem, const Executor& executor) {
  for (int64_t token = 0; token < problem.num_tokens; token += kMaxDenseActivations) {
    Slab slab(problem, token);
    RunPhases(slab.Phases(), executor, slab.MaxThreads());
  }
}

}  // namespace b12x::host
