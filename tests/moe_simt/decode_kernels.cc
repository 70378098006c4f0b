// Runs the MoE decode kernels thread by thread on random small problems: fused twice and split,
// which must agree bit for bit, against a plain reference; and on a grid that is not resident.
// Usage: decode_kernels [cases [seed]]
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/moe/activation.cuh"
#include "cuda/moe/grid_barrier.cuh"
#include "tests/moe_simt/ptx.h"

namespace b12x {
namespace {

using host::BF16;
using host::F16;

constexpr int kTileWords = kMoeTileBytes / 4, kCodeWords = 256;
constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

std::mt19937 random_bits(1);

int Below(int n) { return static_cast<int>(random_bits() % n); }
float Between(float low, float high) { return low + (high - low) * (random_bits() * 0x1p-32f); }
std::vector<float> Floats(size_t n, float low, float high) {
  std::vector<float> v(n);
  for (float& one : v) one = Between(low, high);
  return v;
}

// Weights as they lie in memory, cuda/formats/fp4_tile.cuh, and what they stand for.
struct Matrix {
  int rows, columns, row_tiles, column_tiles;
  bool gated, e8m0;
  std::vector<uint32_t> words;
  std::vector<float> values;  // [num_experts, row_tiles * 16, column_tiles * 128]

  uint32_t* Tile(int expert, int row_tile, int column_tile) {
    return &words[((size_t{1} * expert * row_tiles + row_tile) * column_tiles + column_tile) *
                  kTileWords];
  }
  const float* Row(int expert, int row) const {
    return &values[(size_t{1} * expert * row_tiles * 16 + row) * column_tiles * 128];
  }
};

uint32_t SwappedNibbles(uint32_t byte) { return byte >> 4 | (byte & 15) << 12; }

float ValueAt(const uint32_t* tile, int row, int column, bool e8m0) {
  const int step = column / 32, t = column % 32 / 8, pair = column % 8 / 2, g = row % 8;
  const uint32_t* words = tile + 128 * (step / 2) + 4 * (4 * g + t) + 2 * (row / 8);
  const uint32_t word = words[step % 2];
  const uint32_t joined = (words[0] & 0x06030603u) | (words[1] << 2 & ~0x06030603u);
  uint32_t placed = word;
  if (pair == 1) placed = word << 4;
  if (pair == 2) placed = __funnelshift_r(word, word, 6);
  if (pair == 3) placed = step % 2 ? joined << 6 : __funnelshift_r(joined, joined, 4);
  placed = placed >> 16 * (column % 2) & 0xFFFF;
  uint32_t scale = tile[kCodeWords + 2 * (2 * g + t / 2) + step / 2] >> 16 * (step % 2) & 0xFFFF;
  if (row >= 8) scale = scale >> 8 | (scale & 0xFF) << 8;
  scale = scale >> 4 & 0xFF;
  const float factor = e8m0 ? std::ldexp(1.0f, static_cast<int>(scale) - 127)
                            : simt::FromE4M3(static_cast<uint8_t>(scale & 0x7F));
  return (placed >> 15 ? -1 : 1) * kMagnitudes[placed >> 6 & 7] * factor;
}

// `rows` of the intermediate where it is gated: a tile has 8 gates and the 8 ups beside them.
Matrix RandomMatrix(int num_experts, int rows, int columns, int row_tiles, int column_tiles,
                    bool gated, bool e8m0) {
  Matrix m{rows, columns, row_tiles, column_tiles, gated, e8m0, {}, {}};
  m.words.resize(size_t{1} * num_experts * row_tiles * column_tiles * kTileWords);
  m.values.resize(size_t{1} * num_experts * row_tiles * 16 * column_tiles * 128);
  for (int e = 0; e < num_experts; ++e) {
    for (int r = 0; r < row_tiles; ++r) {
      for (int c = 0; c < column_tiles; ++c) {
        uint32_t* tile = m.Tile(e, r, c);
        for (int i = 0; i < kTileWords; ++i) {
          tile[i] = random_bits();
          if (i < kCodeWords) {
            // Padding is zero.
            const int lane = i % 128 / 4, half = i % 4 / 2, step = i / 128 * 2 + i % 2;
            const int row = gated ? r * 8 + lane / 4 : r * 16 + 8 * half + lane / 4;
            const int column = c * 128 + step * 32 + lane % 4 * 8;
            // Two steps share bits.
            const int first = column - step % 2 * 32;
            if (row >= rows || first >= columns) tile[i] = 0;
            continue;
          }
          uint32_t scales[4];
          for (int k = 0; k < 4; ++k) {
            const uint32_t byte = tile[i] >> 8 * k & 0xFF;
            scales[k] = e8m0 ? 124 + byte % 6 : 0x28 + byte % 0x18;
          }
          tile[i] = scales[0] << 4 | scales[1] << 20 | SwappedNibbles(scales[2]) |
                    SwappedNibbles(scales[3]) << 16;
        }
        for (int row = 0; row < 16; ++row) {
          for (int column = 0; column < 128; ++column) {
            const size_t at = ((size_t{1} * e * row_tiles + r) * 16 + row) * column_tiles * 128;
            m.values[at + c * 128 + column] = ValueAt(tile, row, column, e8m0);
          }
        }
      }
    }
  }
  return m;
}

// NVFP4 as jax_b12x/moe/recipe.py has it, without any of the kernels' shortcuts.
void QuantizeBlock(float* v, float global_scale) {
  float amax = 0;
  for (int i = 0; i < 16; ++i) amax = ptx::max_or_nan(amax, std::fabs(v[i]));
  const float scale =
      simt::FromE4M3(__nv_cvt_float_to_fp8(amax / 6.0f / global_scale, __NV_SATFINITE, __NV_E4M3));
  for (int i = 0; i < 16; ++i) {
    if (scale == 0) {
      v[i] = 0;
      continue;
    }
    const float q = std::fabs(v[i] / (scale * global_scale));
    float code = 0;
    if (q > 0.25f) code = 0.5f;
    if (q >= 0.75f) code = 1;
    if (q > 1.25f) code = 1.5f;
    if (q >= 1.75f) code = 2;
    if (q > 2.5f) code = 3;
    if (q >= 3.5f) code = 4;
    if (q > 5) code = 6;
    v[i] = std::copysign(code, v[i]) * scale * global_scale;
  }
}

float Rounded16(float v, bool fp16) {
  return fp16 ? F16::Widen(F16::Round(v)) : BF16::Widen(BF16::Round(v));
}

struct Case {
  int hidden, intermediate, num_experts, top_k, num_tokens;
  DecodeRecipeId recipe;
  MoeDecodeGeometry geometry;
  bool bias, swiglu_oai, padding, same_experts;

  bool fp16() const { return recipe == DecodeRecipeId::kW4A16Fp16; }
  bool quantized() const { return recipe == DecodeRecipeId::kNvfp4; }
};

Case RandomCase() {
  constexpr int kHidden[] = {64, 128, 256, 288, 400, 656};
  constexpr int kIntermediate[] = {64, 128, 160, 208, 320};
  constexpr int kTokens[] = {1, 1, 2, 5, 8, 12, 20};
  Case c{};
  c.hidden = kHidden[Below(6)];
  c.intermediate = kIntermediate[Below(5)];
  c.num_experts = 3 + Below(8);
  c.top_k = 1 + Below(std::min(c.num_experts, 4));
  c.num_tokens = kTokens[Below(7)];
  c.recipe = static_cast<DecodeRecipeId>(Below(4));
  c.geometry = {2 + Below(4), 1 + Below(6), 1 + Below(16), 1 + Below(16),
                static_cast<Fc2Order>(Below(2))};
  c.bias = Below(2);
  c.swiglu_oai = Below(2);
  c.padding = Below(3) == 0;
  c.same_experts = Below(4) == 0;
  return c;
}

MoeDecodePlan PlanOf(const Case& c) {
  return PlanOf(c.num_tokens, c.top_k, c.hidden, c.intermediate, c.quantized(), c.geometry);
}

// One for the kernel of a single token.
Case RandomOneTokenCase() {
  for (;;) {
    Case c = RandomCase();
    c.num_tokens = 1;
    c.geometry.fc2_order = Fc2Order::kOwner;
    if (PlanOf(c).one_token) return c;
  }
}

// A case with its inputs, and what the kernels write to.
class Problem {
 public:
  explicit Problem(const Case& c) : c(c), shape(ShapeOf(c.hidden, c.intermediate)) {
    const bool e8m0 = c.recipe == DecodeRecipeId::kW4A16Mxfp4;
    w13 = RandomMatrix(c.num_experts, c.intermediate, c.hidden, shape.fc1_row_tiles,
                       shape.fc1_k_tiles, true, e8m0);
    w2 = RandomMatrix(c.num_experts, c.hidden, c.intermediate, shape.fc2_row_tiles,
                      shape.fc2_k_tiles, false, e8m0);
    const float scale = 0.25f / std::sqrt(static_cast<float>(c.hidden));
    w13_global = Floats(2 * c.num_experts, 0.8f * scale, 1.2f * scale);
    w2_global = Floats(c.num_experts, 0.01f, 0.02f);
    w2_input = Floats(c.num_experts, 0.002f, 0.003f);
    w13_bias = Floats(size_t{2} * c.num_experts * c.intermediate, -0.3f, 0.3f);
    w2_bias = Floats(size_t{1} * c.num_experts * c.hidden, -0.3f, 0.3f);
    for (float v : Floats(size_t{1} * c.num_tokens * c.hidden, -2, 2)) {
      x.push_back(c.fp16() ? F16::Round(v) : BF16::Round(v));
    }
    Route();
  }

  MoeDecodeParams Params(GridBarrierParams barrier) {
    const size_t rows = size_t{1} * c.num_tokens * c.top_k;
    // What nobody has written is NaN.
    out.assign(size_t{1} * c.num_tokens * c.hidden, 0xFFFF);
    h.assign(rows * shape.fc2_k_tiles * 128, 0xFFFF);
    input.assign(size_t{1} * c.num_tokens * shape.fc1_k_tiles * 128, 0xFFFF);
    y.assign(rows * shape.fc2_row_tiles * 16, std::nanf(""));
    MoeDecodeParams p{};
    p.x = x.data();
    p.topk_ids = ids.data();
    p.topk_weights = route.data();
    p.w13 = reinterpret_cast<const uint8_t*>(w13.words.data());
    p.w2 = reinterpret_cast<const uint8_t*>(w2.words.data());
    p.w13_global = w13_global.data();
    p.w2_global = w2_global.data();
    p.w13_input = &w13_input;
    p.w2_input = w2_input.data();
    p.w13_bias = c.bias ? w13_bias.data() : nullptr;
    p.w2_bias = c.bias ? w2_bias.data() : nullptr;
    p.out = out.data();
    p.h = h.data();
    p.input = input.data();
    p.y = y.data();
    p.barrier = barrier;
    p.num_tokens = c.num_tokens;
    p.hidden = c.hidden;
    p.intermediate = c.intermediate;
    p.num_experts = c.num_experts;
    p.top_k = c.top_k;
    p.x_is_fp16 = c.fp16();
    p.activation = c.swiglu_oai ? Activation::kSwigluOai : Activation::kSilu;
    p.alpha = 1.702f;
    p.limit = 7;
    p.geometry = c.geometry;
    p.plan = PlanOf(c);
    return p;
  }

  bool Fused(GridBarrierParams barrier, int longest_copy, int resident = 1 << 30) {
    const MoeDecodeParams p = Params(barrier);
    return Fused(p, fused_kernel(c.recipe, p.plan), longest_copy, resident);
  }
  // The kernel for any number of tokens, whatever the plan says.
  bool FusedForAnyNumber(GridBarrierParams barrier) {
    return Fused(Params(barrier), fused_kernel(c.recipe, {}), 20, 1 << 30);
  }
  bool Fused(const MoeDecodeParams& p, MoeDecodeKernel kernel, int longest_copy, int resident) {
    return simt::Run(
        {c.geometry.grid, kMoeDecodeLaunchThreads, p.plan.shared.bytes, longest_copy, resident},
        [&] { kernel(p); });
  }

  bool Split() {
    const MoeDecodeParams p = Params({});
    const SplitKernels kernels = split_kernels(c.recipe);
    const auto run = [&](MoeDecodeKernel kernel, int threads) {
      return simt::Run({c.geometry.grid, threads, p.plan.shared.bytes}, [&] { kernel(p); });
    };
    return (!c.quantized() || p.plan.input_in_shared || run(kernels.quantize, kMoeDecodeThreads)) &&
           run(kernels.fc1, kMoeDecodeLaunchThreads) && run(kernels.fc2, kMoeDecodeLaunchThreads) &&
           (c.geometry.fc2_order == Fc2Order::kOwner || run(kernels.sum, kMoeDecodeThreads));
  }

  // The relative Frobenius error of `out`.
  double Error() const {
    std::vector<double> expected(out.size());
    for (int pair = 0; pair < c.num_tokens * c.top_k; ++pair) AddExpert(pair, &expected);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const float actual = c.fp16() ? F16::Widen(out[i]) : BF16::Widen(out[i]);
      difference += (actual - expected[i]) * (actual - expected[i]);
      norm += expected[i] * expected[i];
    }
    return std::sqrt(norm > 0 ? difference / norm : difference);
  }

  const Case c;
  std::vector<uint16_t> out;

 private:
  void Route() {
    for (int t = 0; t < c.num_tokens; ++t) {
      std::vector<int> order(c.num_experts);
      for (int i = 0; i < c.num_experts; ++i) order[i] = i;
      for (int k = 0; k < c.top_k; ++k) {
        std::swap(order[k], order[k + Below(c.num_experts - k)]);
        int id = c.same_experts ? k : order[k];
        float weight = Between(0.05f, 0.3f);
        if (c.padding && ((t == 0 && c.num_tokens > 1) || Below(3) == 0)) {
          const int outside[] = {-1, c.num_experts, 1 << 30};
          id = outside[Below(3)];
          weight = std::nanf("");
        }
        ids.push_back(id);
        route.push_back(weight);
      }
    }
  }

  void AddExpert(int pair, std::vector<double>* sums) const {
    const int token = pair / c.top_k, e = ids[pair];
    if (e < 0 || e >= c.num_experts) return;
    std::vector<float> row(c.hidden);
    for (int i = 0; i < c.hidden; ++i) {
      const uint16_t bits = x[token * c.hidden + i];
      row[i] = c.fp16() ? F16::Widen(bits) : BF16::Widen(bits);
    }
    if (c.quantized()) {
      for (int i = 0; i < c.hidden; i += 16) QuantizeBlock(&row[i], w13_input);
    }
    std::vector<float> intermediate(c.intermediate);
    for (int n = 0; n < c.intermediate; ++n) {
      double gate = 0, up = 0;
      const float* gate_row = w13.Row(e, n / 8 * 16 + n % 8);
      const float* up_row = w13.Row(e, n / 8 * 16 + 8 + n % 8);
      for (int i = 0; i < c.hidden; ++i) {
        gate += gate_row[i] * double{row[i]};
        up += up_row[i] * double{row[i]};
      }
      const float* bias = &w13_bias[size_t{2} * e * c.intermediate + n];
      gate = gate * w13_global[2 * e] + (c.bias ? bias[0] : 0);
      up = up * w13_global[2 * e + 1] + (c.bias ? bias[c.intermediate] : 0);
      intermediate[n] = activate(c.swiglu_oai ? Activation::kSwigluOai : Activation::kSilu, 1.702f,
                                 7, static_cast<float>(gate), static_cast<float>(up));
    }
    for (int n = 0; n < c.intermediate; n += 16) {
      if (c.quantized()) {
        QuantizeBlock(&intermediate[n], w2_input[e]);
      } else {
        for (int i = n; i < n + 16; ++i) intermediate[i] = Rounded16(intermediate[i], c.fp16());
      }
    }
    for (int n = 0; n < c.hidden; ++n) {
      double sum = 0;
      for (int i = 0; i < c.intermediate; ++i) sum += w2.Row(e, n)[i] * double{intermediate[i]};
      sum = sum * w2_global[e] + (c.bias ? w2_bias[size_t{1} * e * c.hidden + n] : 0);
      (*sums)[token * c.hidden + n] += route[pair] * sum;
    }
  }

  const MoeDecodeShape shape;
  Matrix w13, w2;
  std::vector<float> w13_global, w2_global, w2_input, w13_bias, w2_bias, route, y;
  const float w13_input = 0.0103f;
  std::vector<uint16_t> x, h, input;
  std::vector<int32_t> ids;
};

constexpr uint64_t kNoTimeout = uint64_t{1} << 62;

bool Check(const Case& c, uint64_t* word) {
  std::printf(
      "%d x %d, %d experts, top-%d, %d tokens, recipe %d, grid %d, stages %d, split %d and %d, "
      "order %d%s%s%s%s: ",
      c.hidden, c.intermediate, c.num_experts, c.top_k, c.num_tokens, static_cast<int>(c.recipe),
      c.geometry.grid, c.geometry.stages, c.geometry.fc1_split, c.geometry.fc2_split,
      static_cast<int>(c.geometry.fc2_order), c.bias ? ", bias" : "",
      c.swiglu_oai ? ", SwiGLU-OAI" : "", c.padding ? ", padding" : "",
      c.same_experts ? ", the same experts" : "");
  std::fflush(stdout);
  Problem problem(c);
  const auto failed = [](const char* why) {
    std::printf("FAILED: %s\n", why);
    return false;
  };
  if (!problem.Fused({word, nullptr, kNoTimeout}, 20)) return failed("fused does not end");
  const std::vector<uint16_t> first = problem.out;
  // Both quantize the same numbers but for the order of sums before: few codes differ.
  const double error = problem.Error(), most = c.quantized() ? 1e-2 : 5e-3;
  std::printf("error %.1e\n", error);
  if (!(error < most)) return failed("the error is too large");
  if (!problem.Fused({word, nullptr, kNoTimeout}, 300)) return failed("fused does not end");
  if (problem.out != first) return failed("fused gives other bits when copies are late");
  if (!problem.FusedForAnyNumber({word, nullptr, kNoTimeout})) return failed("it does not end");
  if (problem.out != first) return failed("the kernel for any number of tokens gives other bits");
  if (!problem.Split()) return failed("split does not end");
  return problem.out == first || failed("split gives other bits than fused");
}

// One block begins only when the others have given up.
bool CheckGridThatIsNotResident(int num_tokens, Fc2Order order) {
  Problem problem({256, 128, 6, 2, num_tokens, DecodeRecipeId::kW4A16Bf16, {4, 3, 4, 2, order}});
  const auto all_nan = [&] {
    for (uint16_t v : problem.out) {
      if (!std::isnan(BF16::Widen(v))) return false;
    }
    return true;
  };
  uint64_t word = 0;
  uint32_t fault = 0;
  const bool told = problem.Fused({&word, &fault, 2'000}, 20, 3) && all_nan() && fault == 1 &&
                    (word & kGridBarrierFailed) != 0;
  // Until its owner zeroes the word, nobody trusts it.
  const bool stays = problem.Fused({&word, &fault, kNoTimeout}, 20) && all_nan();
  word = 0;
  const bool heals = problem.Fused({&word, &fault, kNoTimeout}, 20) && problem.Error() < 5e-3;
  std::printf("a grid that is not resident, %d tokens, order %d: %s\n", num_tokens,
              static_cast<int>(order), told && stays && heals ? "NaN, then right again" : "FAILED");
  return told && stays && heals;
}

int Main(int cases, int seed) {
  random_bits.seed(seed);
  uint64_t word = 0;
  for (int i = 0; i < cases; ++i) {
    if (!Check(RandomCase(), &word)) return 1;
  }
  for (int i = 0; i < cases / 2; ++i) {
    if (!Check(RandomOneTokenCase(), &word)) return 1;
  }
  for (int num_tokens : {1, 3}) {
    for (Fc2Order order : {Fc2Order::kOwner, Fc2Order::kExpert}) {
      if (!CheckGridThatIsNotResident(num_tokens, order)) return 1;
    }
  }
  std::printf("all agree\n");
  return 0;
}

}  // namespace
}  // namespace b12x

int main(int argc, char** argv) {
  return b12x::Main(argc > 1 ? std::atoi(argv[1]) : 20, argc > 2 ? std::atoi(argv[2]) : 1);
}
