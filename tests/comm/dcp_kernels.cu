// Runs the kernels of decode context parallelism with 2 to 16 ranks on one GPU, each rank on a
// stream of its own, and compares them with the host. test_dcp_kernels.py builds and runs it, also
// on a CPU, where "small" leaves out what would take long.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/kernels/dcp.h"
#include "ffi/host/all_reduce.h"
#include "ffi/host/dcp.h"

namespace comm = b12x::comm;
namespace host = b12x::host;

namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

int failures = 0;

// A group of ranks with one channel.
class Group {
 public:
  Group(int world_size, int64_t message_bytes) : world_size_(world_size) {
    const int64_t slot = (message_bytes + 15) / 16 * 16;
    const int64_t slots = comm::kBuffers * (world_size - 1) * slot;
    Check(cudaMalloc(&stalled_, sizeof(*stalled_)), "cudaMalloc");
    Check(cudaMemset(stalled_, 0, sizeof(*stalled_)), "cudaMemset");
    Check(cudaHostAlloc(&status_, sizeof(*status_) * world_size, cudaHostAllocMapped), "pinned");
    std::memset(status_, 0, sizeof(*status_) * world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      void* slab = nullptr;
      Check(cudaMalloc(&slab, comm::kHeaderBytes + slots), "cudaMalloc of a slab");
      Check(cudaMemset(slab, 0, comm::kHeaderBytes), "cudaMemset");
      Check(cudaMemset(static_cast<char*>(slab) + comm::kHeaderBytes, 0xFF, slots), "cudaMemset");
      slabs_.push_back(static_cast<unsigned char*>(slab));
      cudaStream_t stream;
      Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
      streams_.push_back(stream);
    }
    for (int rank = 0; rank < world_size; ++rank) {
      comm::ChannelRef ref;
      for (int peer = 0; peer < world_size; ++peer) ref.view.slabs[peer] = slabs_[peer];
      ref.view.status = status_ + rank;
      ref.view.stalled_at = stalled_;
      ref.view.timeout_ns = 2'000'000'000;
      ref.view.slot_bytes = slot;
      ref.view.rank = rank;
      ref.view.world_size = world_size;
      ref.world_size = world_size;
      refs_.push_back(ref);
    }
    Check(cudaDeviceSynchronize(), "synchronize");
  }
  ~Group() {
    for (unsigned char* slab : slabs_) cudaFree(slab);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    cudaFree(stalled_);
    cudaFreeHost(status_);
  }
  const comm::ChannelRef& ref(int rank) const { return refs_[rank]; }
  cudaStream_t stream(int rank) const { return streams_[rank]; }
  bool poisoned() const {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (status_[rank].failed != 0) return true;
    }
    return false;
  }

 private:
  int world_size_;
  unsigned long long* stalled_ = nullptr;
  comm::ChannelStatus* status_ = nullptr;
  std::vector<unsigned char*> slabs_;
  std::vector<cudaStream_t> streams_;
  std::vector<comm::ChannelRef> refs_;
};

template <typename T>
class Device {
 public:
  explicit Device(const std::vector<T>& values) : count_(values.size()) {
    Check(cudaMalloc(&data_, count_ * sizeof(T)), "cudaMalloc");
    Check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  Device(Device&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
  }
  ~Device() { cudaFree(data_); }
  T* get() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    Check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

float Widen(host::FloatType type, const unsigned char* data, int64_t index) {
  return host::Dispatch(type, [&](auto t) {
    using F = decltype(t);
    typename F::Bits bits;
    std::memcpy(&bits, data + index * sizeof(bits), sizeof(bits));
    return F::Widen(bits);
  });
}

void Fill(host::FloatType type, std::mt19937* random, std::vector<unsigned char>* data) {
  std::normal_distribution<float> normal;
  host::Dispatch(type, [&](auto t) {
    using F = decltype(t);
    using Bits = typename F::Bits;
    for (size_t i = 0; i < data->size() / sizeof(Bits); ++i) {
      const Bits bits = F::Round(normal(*random));
      std::memcpy(data->data() + i * sizeof(Bits), &bits, sizeof(bits));
    }
  });
}

float RandomLse(std::mt19937* random) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {-kInf, kInf, nan, 0.0f, -100.0f, 100.0f, 1e30f, -1e30f};
  std::uniform_int_distribution<int> pick(0, 15);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  const int index = pick(*random);
  return index < 8 ? special[index] : normal(*random);
}

comm::FloatType ForKernel(host::FloatType type) {
  if (type == host::FloatType::kF32) return comm::FloatType::kF32;
  return type == host::FloatType::kF16 ? comm::FloatType::kF16 : comm::FloatType::kBF16;
}

void TestCombine(int world_size, host::FloatType type, int64_t outer, int64_t inner,
                 int64_t head_dim, bool base_two, int rounds) {
  const comm::HeadRows rows{outer, inner, world_size};
  const int64_t width = host::ByteWidth(type);
  Group group(world_size, comm::CombineSlotBytes(rows, head_dim, width));
  std::mt19937 random(static_cast<unsigned>(world_size * 1000 + head_dim));
  double worst = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<unsigned char>> partials, outs;
    std::vector<std::vector<float>> lses, out_lses;
    std::vector<Device<unsigned char>> d_partials, d_outs;
    std::vector<Device<float>> d_lses, d_out_lses;
    for (int rank = 0; rank < world_size; ++rank) {
      const int64_t count = rows.count() * world_size;
      partials.emplace_back(count * head_dim * width);
      Fill(type, &random, &partials.back());
      lses.emplace_back(count);
      for (float& lse : lses.back()) lse = RandomLse(&random);
      for (int64_t row = 0; row < count; ++row) {  // an empty shard may hold anything
        if (!std::isfinite(lses.back()[row])) {
          std::memset(partials.back().data() + row * head_dim * width, 0xFF, head_dim * width);
        }
      }
      outs.emplace_back(rows.count() * head_dim * width);
      out_lses.emplace_back(rows.count());
      d_partials.emplace_back(partials.back());
      d_lses.emplace_back(lses.back());
      d_outs.emplace_back(std::vector<unsigned char>(outs.back().size(), 0x55));  // poisoned
      d_out_lses.emplace_back(std::vector<float>(rows.count(), 12345.0f));
    }
    std::vector<host::CombineBuffers> buffers;
    for (int rank = 0; rank < world_size; ++rank) {
      buffers.push_back(
          {partials[rank].data(), lses[rank].data(), outs[rank].data(), out_lses[rank].data()});
    }
    host::DcpCombine(type, rows, head_dim, base_two, buffers);
    for (int rank = 0; rank < world_size; ++rank) {
      Check(comm::LaunchDcpCombine(ForKernel(type),
                                   {d_partials[rank].get(), d_lses[rank].get(), d_outs[rank].get(),
                                    d_out_lses[rank].get()},
                                   rows, head_dim, base_two, group.ref(rank), group.stream(rank)),
            "LaunchDcpCombine");
    }
    Check(cudaDeviceSynchronize(), "combine");
    // Values of up to about 6, fp32 sums, then one rounding which may go the other way.
    const double unit = type == host::FloatType::kBF16  ? 0x1p-7
                        : type == host::FloatType::kF16 ? 0x1p-10
                                                        : 0x1p-20;
    for (int rank = 0; rank < world_size; ++rank) {
      const std::vector<unsigned char> got = d_outs[rank].Read();
      for (int64_t i = 0; i < rows.count() * head_dim; ++i) {
        const double expected = Widen(type, outs[rank].data(), i);
        const double error = std::abs(Widen(type, got.data(), i) - expected);
        const double allowed = unit * std::abs(expected) + 2e-5;
        if (!(error <= allowed)) {
          if (++failures < 20) {
            std::printf("combine world %d dim %d rank %d element %lld: %g, not %g\n", world_size,
                        static_cast<int>(head_dim), rank, static_cast<long long>(i),
                        Widen(type, got.data(), i), expected);
          }
        }
        worst = std::max(worst, error / allowed);
      }
      const std::vector<float> got_lse = d_out_lses[rank].Read();
      for (int64_t row = 0; row < rows.count(); ++row) {
        const float expected = out_lses[rank][row];
        const bool same = std::isinf(expected) ? got_lse[row] == expected
                                               : std::abs(got_lse[row] - expected) <=
                                                     2e-6f * std::max(1.0f, std::abs(expected));
        if (!same && ++failures < 20) {
          std::printf("combine world %d row %lld: lse %g, not %g\n", world_size,
                      static_cast<long long>(row), got_lse[row], expected);
        }
      }
    }
  }
  if (group.poisoned()) {
    ++failures;
    std::printf("combine world %d dim %d: timed out\n", world_size, static_cast<int>(head_dim));
  }
  std::printf("combine world %2d type %d [%lld, %lld] dim %4lld base %s: worst %.2f of allowed\n",
              world_size, static_cast<int>(type), static_cast<long long>(outer),
              static_cast<long long>(inner), static_cast<long long>(head_dim), base_two ? "2" : "e",
              worst);
}

void TestGather(int world_size, int64_t outer, int64_t row_bytes, int64_t second_outer,
                int64_t second_row_bytes, int rounds) {
  const int64_t outers[2] = {outer, second_outer};
  const int64_t rows[2] = {row_bytes, second_row_bytes};
  Group group(world_size, comm::GatherSlotBytes(outer * row_bytes) +
                              comm::GatherSlotBytes(second_outer * second_row_bytes));
  std::mt19937 random(7);
  std::uniform_int_distribution<int> byte(0, 254);  // no word of all ones
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<unsigned char>> parts[2], wholes[2];
    std::vector<Device<unsigned char>> d_parts[2], d_wholes[2];
    for (int t = 0; t < 2; ++t) {
      std::vector<host::GatherBuffers> buffers;
      for (int rank = 0; rank < world_size; ++rank) {
        parts[t].emplace_back(outers[t] * rows[t]);
        for (unsigned char& each : parts[t].back()) each = static_cast<unsigned char>(byte(random));
        wholes[t].emplace_back(outers[t] * rows[t] * world_size);
        d_parts[t].emplace_back(parts[t].back());
        d_wholes[t].emplace_back(std::vector<unsigned char>(wholes[t].back().size(), 0xFF));
      }
      for (int rank = 0; rank < world_size; ++rank) {
        buffers.push_back({parts[t][rank].data(), wholes[t][rank].data()});
      }
      host::DcpGather(outers[t], rows[t], buffers);
    }
    for (int rank = 0; rank < world_size; ++rank) {
      comm::GatherTensor tensors[2];
      for (int t = 0; t < 2; ++t) {
        tensors[t] = {d_parts[t][rank].get(), d_wholes[t][rank].get(), outers[t] * rows[t],
                      rows[t] == 0 ? 8 : rows[t]};
      }
      Check(comm::LaunchDcpGather(tensors[0], tensors[1], group.ref(rank), group.stream(rank)),
            "LaunchDcpGather");
    }
    Check(cudaDeviceSynchronize(), "gather");
    for (int t = 0; t < 2; ++t) {
      for (int rank = 0; rank < world_size; ++rank) {
        if (d_wholes[t][rank].Read() != wholes[t][rank]) {
          ++failures;
          std::printf("gather world %d tensor %d rank %d differs\n", world_size, t, rank);
        }
      }
    }
  }
  if (group.poisoned()) {
    ++failures;
    std::printf("gather world %d: timed out\n", world_size);
  }
  std::printf("gather world %2d [%lld x %lld] + [%lld x %lld]\n", world_size,
              static_cast<long long>(outer), static_cast<long long>(row_bytes),
              static_cast<long long>(second_outer), static_cast<long long>(second_row_bytes));
}

// A rank that never comes: NaN, a bounded wait, and the fault is reported.
void TestTimeout() {
  const comm::HeadRows rows{1, 4, 3};
  Group group(3, comm::CombineSlotBytes(rows, 64, 4));
  Device<float> partial(std::vector<float>(12 * 64, 1.0f)), lse(std::vector<float>(12, 0.0f));
  Device<float> out(std::vector<float>(4 * 64, 5.0f)), out_lse(std::vector<float>(4, 5.0f));
  for (int call = 0; call < 2; ++call) {
    Check(comm::LaunchDcpCombine(comm::FloatType::kF32,
                                 {partial.get(), lse.get(), out.get(), out_lse.get()}, rows, 64,
                                 false, group.ref(0), group.stream(0)),
          "LaunchDcpCombine");
    Check(cudaDeviceSynchronize(), "a lonely combine");
    for (const float value : out.Read()) failures += std::isnan(value) ? 0 : 1;
    for (const float value : out_lse.Read()) failures += std::isnan(value) ? 0 : 1;
    failures += group.poisoned() ? 0 : 1;
  }
  std::printf("timeout: %s\n", group.poisoned() ? "reported" : "NOT reported");
}

}  // namespace

int main(int argc, char** argv) {
  using host::FloatType;
  const bool small = argc > 1 && std::strcmp(argv[1], "small") == 0;
  const int rounds = 3;  // both buffers, and the first again
  for (const int world_size : {2, 3, 4, 8, 16}) {
    if (small && (world_size == 4 || world_size == 8)) continue;
    for (const FloatType type : {FloatType::kBF16, FloatType::kF16, FloatType::kF32}) {
      TestCombine(world_size, type, 1, 3, 128, false, rounds);
      TestCombine(world_size, type, 5, 2, 8, true, rounds);
      if (small && world_size == 16) break;
      TestCombine(world_size, type, 2, 1, 576, false, rounds);
      TestCombine(world_size, type, 1, 2, 1024, true, rounds);
    }
    TestGather(world_size, 3, 256, 0, 0, rounds);
    TestGather(world_size, 5, 8, 3, 1152, rounds);
    TestGather(world_size, 7, 24, 1, 40, rounds);
  }
  // More rows than warps, more packets than threads; fewer do when there are few blocks.
  TestCombine(2, FloatType::kBF16, small ? 30 : 64, small ? 5 : 64, 128, false, rounds);
  TestGather(2, small ? 8 : 64, small ? 4096 : 65536, small ? 8 : 64, 128, rounds);
  TestTimeout();
  std::printf(failures == 0 ? "all agree\n" : "%d FAILURES\n", failures);
  return failures == 0 ? 0 : 1;
}
