// Runs the threads of kernels as fibers, in turns, on one CPU thread. A fiber gives its turn away
// where a GPU thread may wait: at barriers, in exchanges of a warp, at every volatile load. Streams
// run side by side, the kernels of one stream one after another. The turns begin at another thread
// each time, so that no order of threads or ranks is the only one that is tried.
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simt {
namespace {

constexpr size_t kStackBytes = 32 * 1024;

struct Warp {
  // Two, since a lane may come to the next exchange while another reads of this one.
  unsigned char lanes[2][kWarp * kLaneBytes];
  int arrived = 0;
  unsigned exchanges = 0;
};

struct Block {
  std::vector<Warp> warps;
  std::map<std::string, std::vector<unsigned char>> shared;
  int arrived = 0;
  unsigned barriers = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  Place place;
  Block* block = nullptr;
  const std::function<void()>* kernel = nullptr;
  bool ended = false;
};

struct Grid {
  std::function<void()> kernel;
  int stream = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  size_t running = 0;
};

Fiber* running = nullptr;
ucontext_t scheduler;
std::vector<std::unique_ptr<Grid>> launched;
int streams = 0;

void Run() {
  (*running->kernel)();
  running->ended = true;
  Yield();
}

// Gives each thread of a grid one turn.
void TurnOf(Grid* grid, size_t first) {
  const size_t count = grid->fibers.size();
  for (size_t i = 0; i < count; ++i) {
    Fiber* fiber = grid->fibers[(first + i) % count].get();
    if (fiber->ended) continue;
    running = fiber;
    swapcontext(&scheduler, &fiber->context);
    if (fiber->ended) --grid->running;
  }
}

}  // namespace

const Place& Here() { return running->place; }

void Yield() {
  Fiber* self = running;
  swapcontext(&self->context, &scheduler);
}

void SyncThreads() {
  Block* block = running->block;
  const unsigned barrier = block->barriers;
  if (++block->arrived == running->place.block_dim.x) {
    block->arrived = 0;
    ++block->barriers;
  }
  while (block->barriers == barrier) Yield();
}

const unsigned char* Exchange(const void* value, size_t bytes) {
  Warp& warp = running->block->warps[running->place.thread.x / kWarp];
  const unsigned exchange = warp.exchanges;
  unsigned char* lanes = warp.lanes[exchange % 2];
  std::memcpy(lanes + running->place.thread.x % kWarp * kLaneBytes, value, bytes);
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.exchanges;
  }
  while (warp.exchanges == exchange) Yield();
  return lanes;
}

void* Shared(const char* name, size_t bytes) {
  std::vector<unsigned char>& memory = running->block->shared[name];
  if (memory.empty()) memory.assign(bytes, 0xAB);  // nobody may count on zeros
  return memory.data();
}

unsigned long long Clock() {
  static unsigned long long now = 1;
  return now += 200'000;
}

void Launch(std::function<void()> kernel, unsigned blocks, unsigned threads, int stream) {
  auto grid = std::make_unique<Grid>();
  grid->kernel = std::move(kernel);
  grid->stream = stream;
  grid->running = static_cast<size_t>(blocks) * threads;
  for (unsigned b = 0; b < blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->warps.resize(threads / kWarp);
    for (unsigned t = 0; t < threads; ++t) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack = std::make_unique<unsigned char[]>(kStackBytes);
      fiber->place = {{static_cast<int>(t)},
                      {static_cast<int>(b)},
                      {static_cast<int>(threads)},
                      {static_cast<int>(blocks)}};
      fiber->block = block.get();
      fiber->kernel = &grid->kernel;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber->context, &Run, 0);
      grid->fibers.push_back(std::move(fiber));
    }
    grid->blocks.push_back(std::move(block));
  }
  launched.push_back(std::move(grid));
}

}  // namespace simt

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = ++simt::streams;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  using simt::launched;
  uint32_t random = 1;
  while (!launched.empty()) {
    std::set<int> busy;
    for (const auto& grid : launched) {
      if (!busy.insert(grid->stream).second) continue;
      random = random * 1664525 + 1013904223;
      simt::TurnOf(grid.get(), random >> 8);
    }
    launched.erase(std::remove_if(launched.begin(), launched.end(),
                                  [](const auto& grid) { return grid->running == 0; }),
                   launched.end());
  }
  return cudaSuccess;
}
