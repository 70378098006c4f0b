// Checks and times the MoE decode kernels without XLA: a CUDA graph of layers with weights and
// routes of their own. Each fused geometry is compared with a plain reference on the GPU, and bit
// for bit with split, before it is timed. moe.sh builds it. Usage: moe_decode_chain [case], a
// number from 1 on; all cases otherwise. `moe_decode_chain check` compares small cases and times
// nothing: for compute-sanitizer.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/launch/moe_decode.h"
#include "cuda/moe/activation.cuh"

namespace {

using namespace b12x;  // NOLINT

constexpr double kBytesPerMicrosecond = 4.55e6;  // what a kernel that only reads reaches on an H200
constexpr int kTopK = 8, kMaxTokens = 64, kRouteSets = 64, kReplays = 7;
constexpr int64_t kScratchBytes = 64 << 20;
constexpr int kTileWords = kMoeTileBytes / 4, kCodeWords = 256;

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

template <typename T>
T* Allocate(size_t count) {
  T* memory = nullptr;
  Check(cudaMalloc(&memory, count * sizeof(T)));
  return memory;
}

__device__ uint32_t Hash(uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x ^ x >> 33);
}

// Any codes, and block scales of a middling size.
__global__ void FillTiles(uint32_t* words, size_t count, uint64_t seed) {
  const size_t step = size_t{1} * gridDim.x * blockDim.x;
  for (size_t i = size_t{1} * blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t word = Hash(seed << 40 ^ i);
    if (i % kTileWords >= kCodeWords) {
      uint32_t s[4];
      for (int k = 0; k < 4; ++k) s[k] = 0x28 + (word >> 8 * k & 0xFF) % 0x18;
      word = s[0] << 4 | s[1] << 20 | s[2] >> 4 | (s[2] & 15) << 12 | s[3] >> 4 << 16 |
             (s[3] & 15) << 28;
    }
    words[i] = word;
  }
}

__global__ void FillFloats(float* to, int count, float low, float high, uint64_t seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = low + (high - low) * (Hash(seed << 40 ^ i) * 0x1p-32f);
}

__global__ void FillBf16(uint16_t* to, int count, uint64_t seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from_float(4 * (Hash(seed << 40 ^ i) * 0x1p-32f) - 2, false);
}

__device__ float ValueAt(const uint32_t* tile, int row, int column) {
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
  const int exponent = scale >> 7 & 15, mantissa = scale >> 4 & 7;
  const float factor =
      exponent == 0 ? ldexpf(mantissa / 8.0f, -6) : ldexpf(1 + mantissa / 8.0f, exponent - 7);
  const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return (placed >> 15 ? -1 : 1) * magnitudes[placed >> 6 & 7] * factor;
}

// NVFP4 of a block with divisions, or no quantization at all.
__device__ void RoundBlock(float* v, float global_scale, bool quantized) {
  float amax = 0;
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(v[i]));
  const float exact = __fdiv_rn(__fdiv_rn(amax, 6.0f), global_scale);
  const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(exact, __NV_SATFINITE, __NV_E4M3);
  const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  for (int i = 0; i < 16 && quantized; ++i) {
    const float q = scale == 0 ? 0 : fabsf(__fdiv_rn(v[i], __fmul_rn(scale, global_scale)));
    float rounded = 0;
    const float above[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    const float values[7] = {0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int k = 0; k < 7; ++k) {
      if (k % 2 == 0 ? q > above[k] : q >= above[k]) rounded = values[k];
    }
    v[i] = copysignf(rounded, v[i]) * scale * global_scale;
  }
}

__global__ void ReferenceInput(const uint16_t* x, float* to, int blocks, const float* global_scale,
                               bool quantized) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= blocks) return;
  for (int i = 0; i < 16; ++i) to[b * 16 + i] = to_float(x[b * 16 + i], false);
  RoundBlock(to + b * 16, *global_scale, quantized);
}

__device__ float SumOfWarp(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// A warp for each (pair, column).
__global__ void ReferenceFc1(const float* x, const MoeDecodeParams p, MoeDecodeShape shape,
                             float* h) {
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int pair = warp / p.intermediate, column = warp % p.intermediate;
  if (pair >= p.num_tokens * p.top_k) return;
  const int e = p.topk_ids[pair];
  const auto* tiles =
      reinterpret_cast<const uint32_t*>(p.w13) +
      (size_t{1} * e * shape.fc1_row_tiles + column / 8) * shape.fc1_k_tiles * kTileWords;
  const float* row = x + size_t{1} * (pair / p.top_k) * p.hidden;
  float gate = 0, up = 0;
  for (int k = lane; k < p.hidden; k += 32) {
    gate += ValueAt(tiles + k / 128 * kTileWords, column % 8, k % 128) * row[k];
    up += ValueAt(tiles + k / 128 * kTileWords, 8 + column % 8, k % 128) * row[k];
  }
  gate = SumOfWarp(gate) * p.w13_global[2 * e];
  up = SumOfWarp(up) * p.w13_global[2 * e + 1];
  if (lane == 0) {
    h[size_t{1} * pair * p.intermediate + column] = activate(p.activation, 1, 1, gate, up);
  }
}

__global__ void ReferenceIntermediate(float* h, const MoeDecodeParams p, bool quantized) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x, blocks = p.intermediate / 16;
  if (b >= p.num_tokens * p.top_k * blocks) return;
  float* v = h + size_t{1} * b * 16;
  for (int i = 0; i < 16 && !quantized; ++i) v[i] = to_float(from_float(v[i], false), false);
  RoundBlock(v, p.w2_input[p.topk_ids[b / blocks]], quantized);
}

// A warp for each (token, row).
__global__ void ReferenceFc2(const float* h, const MoeDecodeParams p, MoeDecodeShape shape,
                             float* out) {
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  const int token = warp / p.hidden, row = warp % p.hidden;
  if (token >= p.num_tokens) return;
  float total = 0;
  for (int s = 0; s < p.top_k; ++s) {
    const int pair = token * p.top_k + s, e = p.topk_ids[pair];
    const auto* tiles =
        reinterpret_cast<const uint32_t*>(p.w2) +
        (size_t{1} * e * shape.fc2_row_tiles + row / 16) * shape.fc2_k_tiles * kTileWords;
    float y = 0;
    for (int k = lane; k < p.intermediate; k += 32) {
      y += ValueAt(tiles + k / 128 * kTileWords, row % 16, k % 128) *
           h[size_t{1} * pair * p.intermediate + k];
    }
    total += p.topk_weights[pair] * SumOfWarp(y) * p.w2_global[e];
  }
  if (lane == 0) out[size_t{1} * token * p.hidden + row] = total;
}

int Blocks(size_t threads) { return static_cast<int>((threads + 255) / 256); }

struct Case {
  int hidden, intermediate, num_experts, num_tokens;
  std::vector<int> fc1_splits, fc2_splits;
};

class Layers {
 public:
  Layers(const Case& c, int layers)
      : c(c), layers(layers), shape(ShapeOf(c.hidden, c.intermediate)) {
    Check(cudaStreamCreate(&stream));
    const size_t w13_words = WordsOf(shape.fc1_row_tiles, shape.fc1_k_tiles) * layers;
    const size_t w2_words = WordsOf(shape.fc2_row_tiles, shape.fc2_k_tiles) * layers;
    w13 = Allocate<uint32_t>(w13_words);
    w2 = Allocate<uint32_t>(w2_words);
    FillTiles<<<2048, 256, 0, stream>>>(w13, w13_words, 1);
    FillTiles<<<2048, 256, 0, stream>>>(w2, w2_words, 2);
    const int experts = c.num_experts, values = kMaxTokens * c.hidden;
    const float scale = 0.25f / std::sqrt(static_cast<float>(c.hidden));
    FillFloats<<<Blocks(2 * experts), 256, 0, stream>>>(w13_global, 2 * experts, 0.8f * scale,
                                                        1.2f * scale, 3);
    FillFloats<<<Blocks(experts), 256, 0, stream>>>(w2_global, experts, 0.01f, 0.02f, 4);
    FillFloats<<<1, 32, 0, stream>>>(w13_input, 1, 0.01f, 0.011f, 5);
    FillFloats<<<Blocks(experts), 256, 0, stream>>>(w2_input, experts, 0.002f, 0.003f, 6);
    x = Allocate<uint16_t>(values);
    FillBf16<<<Blocks(values), 256, 0, stream>>>(x, values, 7);
    for (uint16_t*& out : outs) out = Allocate<uint16_t>(values);
    exact_x = Allocate<float>(values);
    exact_out = Allocate<float>(values);
    exact_h = Allocate<float>(size_t{1} * kMaxTokens * kTopK * c.intermediate);
    Check(cudaMemset(word, 0, sizeof(*word)));
    Check(cudaStreamSynchronize(stream));
    DrawRoutes();
  }
  Layers(const Layers&) = delete;
  ~Layers() {
    for (void* memory :
         {static_cast<void*>(w13), static_cast<void*>(w2), static_cast<void*>(w13_global),
          static_cast<void*>(w2_global), static_cast<void*>(w13_input),
          static_cast<void*>(w2_input), static_cast<void*>(x), static_cast<void*>(outs[0]),
          static_cast<void*>(outs[1]), static_cast<void*>(exact_x), static_cast<void*>(exact_out),
          static_cast<void*>(exact_h), static_cast<void*>(ids), static_cast<void*>(route),
          static_cast<void*>(word), static_cast<void*>(scratch)}) {
      cudaFree(memory);
    }
    cudaStreamDestroy(stream);
  }

  double Floor() const {
    return touched * 3 * c.hidden * c.intermediate * 0.5625 / kBytesPerMicrosecond;
  }

  bool Fits(const MoeDecodeGeometry& g, bool quantized) const {
    return PlanOf(c.num_tokens, kTopK, c.hidden, c.intermediate, quantized, g).shared.bytes <=
           227 << 10;
  }

  void ComputeReference(bool quantized) {
    const MoeDecodeParams p = Params(0, {}, nullptr);
    const int pairs = c.num_tokens * kTopK, blocks = c.num_tokens * c.hidden / 16;
    ReferenceInput<<<Blocks(blocks), 256, 0, stream>>>(x, exact_x, blocks, w13_input, quantized);
    ReferenceFc1<<<Blocks(size_t{32} * pairs * c.intermediate), 256, 0, stream>>>(exact_x, p, shape,
                                                                                  exact_h);
    ReferenceIntermediate<<<Blocks(size_t{1} * pairs * c.intermediate / 16), 256, 0, stream>>>(
        exact_h, p, quantized);
    ReferenceFc2<<<Blocks(size_t{32} * c.num_tokens * c.hidden), 256, 0, stream>>>(
        exact_h, p, shape, exact_out);
    Check(cudaStreamSynchronize(stream));
  }

  bool Agrees(const MoeDecodeGeometry& g, bool quantized) {
    const size_t values = size_t{1} * c.num_tokens * c.hidden;
    for (uint16_t* out : outs) Check(cudaMemset(out, 0xFF, values * 2));  // NaN
    Check(cudaMemset(scratch, 0xFF, 8 << 20));
    Start(0, g, quantized, DecodeLaunch::kFused, outs[0]);
    Start(0, g, quantized, DecodeLaunch::kSplit, outs[1]);
    Check(cudaStreamSynchronize(stream));
    std::vector<uint16_t> fused(values), split(values);
    std::vector<float> exact(values);
    Check(cudaMemcpy(fused.data(), outs[0], values * 2, cudaMemcpyDeviceToHost));
    Check(cudaMemcpy(split.data(), outs[1], values * 2, cudaMemcpyDeviceToHost));
    Check(cudaMemcpy(exact.data(), exact_out, values * 4, cudaMemcpyDeviceToHost));
    double difference = 0, norm = 0;
    for (size_t i = 0; i < values; ++i) {
      const uint32_t bits = static_cast<uint32_t>(fused[i]) << 16;
      float v;
      std::memcpy(&v, &bits, sizeof(v));
      difference += (v - exact[i]) * double{v - exact[i]};
      norm += exact[i] * double{exact[i]};
    }
    return std::sqrt(difference / norm) < (quantized ? 1e-2 : 5e-3) && fused == split;
  }

  // Microseconds a layer.
  float Time(const MoeDecodeGeometry& g, bool quantized, DecodeLaunch launch) {
    const int length = c.num_tokens == 1 ? 64 : c.num_tokens <= 8 ? 32 : 16;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaEvent_t begin, end;
    Check(cudaEventCreate(&begin));
    Check(cudaEventCreate(&end));
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < length; ++i) Start(i, g, quantized, launch, outs[0]);
    Check(cudaStreamEndCapture(stream, &graph));
    Check(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < kReplays + 2; ++i) {
      Check(cudaEventRecord(begin, stream));
      Check(cudaGraphLaunch(executable, stream));
      Check(cudaEventRecord(end, stream));
      Check(cudaStreamSynchronize(stream));
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begin, end));
      if (i >= 2) times.push_back(milliseconds * 1e3f / length);
    }
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return times[times.size() / 2];
  }

 private:
  size_t WordsOf(int row_tiles, int k_tiles) const {
    return size_t{1} * c.num_experts * row_tiles * k_tiles * kTileWords;
  }

  void DrawRoutes() {
    std::mt19937 random(c.num_tokens * 131 + c.hidden);
    std::vector<int> drawn;
    std::vector<float> weights;
    for (int set = 0; set < kRouteSets; ++set) {
      std::set<int> all;
      for (int t = 0; t < c.num_tokens; ++t) {
        std::vector<int> order(c.num_experts);
        for (int i = 0; i < c.num_experts; ++i) order[i] = i;
        for (int k = 0; k < kTopK; ++k) {
          std::swap(order[k], order[k + random() % (c.num_experts - k)]);
          drawn.push_back(order[k]);
          weights.push_back(0.05f + random() % 1000 / 5000.0f);
          all.insert(order[k]);
        }
      }
      touched += static_cast<double>(all.size()) / kRouteSets;
    }
    ids = Allocate<int>(drawn.size());
    route = Allocate<float>(drawn.size());
    Check(cudaMemcpy(ids, drawn.data(), drawn.size() * 4, cudaMemcpyHostToDevice));
    Check(cudaMemcpy(route, weights.data(), drawn.size() * 4, cudaMemcpyHostToDevice));
  }

  MoeDecodeParams Params(int i, const MoeDecodeGeometry& g, uint16_t* out) const {
    const size_t routes = size_t{1} * (i % kRouteSets) * c.num_tokens * kTopK;
    MoeDecodeParams p{};
    p.x = x;
    p.topk_ids = ids + routes;
    p.topk_weights = route + routes;
    p.w13 = reinterpret_cast<const uint8_t*>(
        w13 + i % layers * WordsOf(shape.fc1_row_tiles, shape.fc1_k_tiles));
    p.w2 = reinterpret_cast<const uint8_t*>(
        w2 + i % layers * WordsOf(shape.fc2_row_tiles, shape.fc2_k_tiles));
    p.w13_global = w13_global;
    p.w2_global = w2_global;
    p.w13_input = w13_input;
    p.w2_input = w2_input;
    p.out = out;
    p.barrier = {word, nullptr, kGridBarrierTimeoutNs};
    p.num_tokens = c.num_tokens;
    p.hidden = c.hidden;
    p.intermediate = c.intermediate;
    p.num_experts = c.num_experts;
    p.top_k = kTopK;
    p.activation = Activation::kSilu;
    p.geometry = g;
    return p;
  }

  void Start(int i, const MoeDecodeGeometry& g, bool quantized, DecodeLaunch launch,
             uint16_t* out) {
    const LaunchStatus status = launch_moe_decode(
        Params(i, g, out), quantized ? DecodeRecipeId::kNvfp4 : DecodeRecipeId::kW4A16Bf16, launch,
        scratch, kScratchBytes, stream);
    if (status.reason != nullptr) std::printf("refused: %s\n", status.reason);
    if (!status.ok()) Check(status.error);
  }

  const Case c;
  const int layers;
  const MoeDecodeShape shape;
  cudaStream_t stream = nullptr;
  uint32_t *w13 = nullptr, *w2 = nullptr;
  float *w13_global = Allocate<float>(2 * kMoeMaxExperts),
        *w2_global = Allocate<float>(kMoeMaxExperts), *w13_input = Allocate<float>(1),
        *w2_input = Allocate<float>(kMoeMaxExperts);
  uint16_t *x = nullptr, *outs[2] = {};
  float *exact_x = nullptr, *exact_h = nullptr, *exact_out = nullptr;
  int* ids = nullptr;
  float* route = nullptr;
  uint64_t* word = Allocate<uint64_t>(1);
  uint8_t* scratch = Allocate<uint8_t>(kScratchBytes);
  double touched = 0;
};

// The fastest geometries of a case; false when one gives wrong results.
bool Sweep(const Case& c) {
  Layers layers(c, c.hidden == 4096 ? 4 : 8);
  const double floor = layers.Floor();
  std::printf("\n%d x %d, %d experts, %d tokens: floor %.2f us, aim %.2f\n", c.hidden,
              c.intermediate, c.num_experts, c.num_tokens, floor, floor / 0.8 + 2);
  bool right = true;
  for (bool quantized : {false, true}) {
    layers.ComputeReference(quantized);
    std::vector<std::pair<float, std::string>> times[2];
    for (int stages : {4, 6, 8}) {
      for (int fc1_split : c.fc1_splits) {
        for (int fc2_split : c.fc2_splits) {
          for (Fc2Order order : {Fc2Order::kOwner, Fc2Order::kExpert}) {
            if (c.num_tokens == 1 && order == Fc2Order::kExpert) continue;
            if (c.num_tokens == 64 && order == Fc2Order::kOwner) continue;
            const MoeDecodeGeometry g{132, stages, fc1_split, fc2_split, order};
            if (!layers.Fits(g, quantized)) continue;
            char name[80];
            std::snprintf(name, sizeof(name), "(%d, %d, %d, %d)", stages, fc1_split, fc2_split,
                          static_cast<int>(order));
            if (!layers.Agrees(g, quantized)) {
              std::printf("WRONG: %s %s\n", quantized ? "nvfp4" : "w4a16", name);
              right = false;
              continue;
            }
            for (DecodeLaunch launch : {DecodeLaunch::kFused, DecodeLaunch::kSplit}) {
              times[static_cast<int>(launch)].emplace_back(layers.Time(g, quantized, launch), name);
            }
          }
        }
      }
    }
    for (int launch = 0; launch < 2; ++launch) {
      std::sort(times[launch].begin(), times[launch].end());
      std::printf("  %s %s:", quantized ? "nvfp4" : "w4a16", launch == 0 ? "fused" : "split");
      for (size_t i = 0; i < times[launch].size() && i < 3; ++i) {
        std::printf("  %.2f %s", times[launch][i].first, times[launch][i].second.c_str());
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return right;
}

bool CheckSmallCases() {
  bool right = true;
  for (int num_tokens : {1, 3, 12}) {
    Layers layers({256, 128, kTopK, num_tokens, {}, {}}, 1);
    for (bool quantized : {false, true}) {
      layers.ComputeReference(quantized);
      for (Fc2Order order : {Fc2Order::kOwner, Fc2Order::kExpert}) {
        const bool agrees = layers.Agrees({6, 3, 2, 1, order}, quantized);
        std::printf("%d tokens, %s, order %d %s\n", num_tokens, quantized ? "nvfp4" : "w4a16",
                    static_cast<int>(order), agrees ? "ran" : "WRONG");
        right &= agrees;
      }
    }
  }
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "check") == 0) return CheckSmallCases() ? 0 : 1;
  const std::vector<Case> cases = {
      {2048, 768, 128, 1, {16, 8}, {6, 3, 2}}, {2048, 768, 128, 8, {8, 6, 4}, {3, 2, 1}},
      {2048, 768, 128, 64, {8, 6}, {3, 2}},    {4096, 1408, 128, 1, {16, 11}, {4, 6, 3}},
      {4096, 1408, 128, 8, {16, 11}, {4, 6}},  {4096, 1408, 128, 64, {16}, {4, 6}},
      {6144, 256, 256, 1, {16, 12}, {2, 1}},
  };
  const int only = argc > 1 ? std::atoi(argv[1]) : 0;
  bool right = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (only == 0 || only == static_cast<int>(i) + 1) right &= Sweep(cases[i]);
  }
  std::printf(right ? "all agree\n" : "FAILED\n");
  return right ? 0 : 1;
}
