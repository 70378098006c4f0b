#include "tests/moe_simt/simt.h"

#include <cstdio>
#include <cstdlib>

// Saves the callee's registers and the stack, and goes on with another stack.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.globl simt_switch
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace simt {
namespace {

constexpr size_t kStackBytes = 48 * 1024;
constexpr int kSavedRegisters = 6;
constexpr long kMostTurns = 400'000;
constexpr int kTurnsOfAMood = 2'000;

struct Fiber {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  Place place;
  Block* block = nullptr;
  bool ended = false;
};

Fiber* running = nullptr;
const std::function<void()>* body = nullptr;
void* scheduler = nullptr;
long now = 0;
uint32_t state = 1;
int longest_copy = 0;

void Begin() {
  (*body)();
  running->ended = true;
  Yield();
  std::abort();
}

void Prepare(Fiber* fiber) {
  fiber->stack.resize(kStackBytes);
  const auto end = reinterpret_cast<uintptr_t>(fiber->stack.data() + kStackBytes);
  auto** top = reinterpret_cast<void**>(end & ~uintptr_t{63});
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Begin);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
}

void LetCopiesCome(Block* block) {
  for (size_t i = 0; i < block->copies.size();) {
    const Copy copy = block->copies[i];
    if (copy.comes_at > now) {
      ++i;
      continue;
    }
    std::memcpy(block->shared.data() + copy.to - kSharedBegin, copy.from, copy.bytes);
    Barrier& barrier = block->barriers[copy.barrier];
    barrier.bytes -= copy.bytes;
    barrier.EndPhaseIfComplete();
    block->copies[i] = block->copies.back();
    block->copies.pop_back();
  }
}

// A quarter of the warps get a turn in up to 30.
void ChangeMoods(std::vector<int>* turns_in) {
  for (int& n : *turns_in) n = Random() % 4 == 0 ? 1 + static_cast<int>(Random() % 30) : 1;
}

}  // namespace

const Place& Here() { return running->place; }
Block& ThisBlock() { return *running->block; }
long Now() { return now; }
uint32_t Random() {
  state = state * 1664525 + 1013904223;
  return state >> 8;
}
void Yield() {
  Fiber* self = running;
  simt_switch(&self->stack_pointer, scheduler);
}
void Fail(const char* what) {
  std::printf("FAILED: %s (block %d, thread %d)\n", what, Here().block, Here().thread);
  std::fflush(stdout);
  std::exit(2);
}

bool Run(const Launch& launch, const std::function<void()>& kernel) {
  std::vector<Block> blocks(launch.blocks);
  for (Block& block : blocks) {
    // Nobody may count on zeros.
    block.shared.assign(launch.shared_bytes, static_cast<char>(0xFF));
    block.warps.resize(launch.threads / kWarp);
  }
  const int warps_a_block = launch.threads / kWarp, warps = launch.blocks * warps_a_block;
  std::vector<Fiber> fibers(launch.blocks * launch.threads);
  for (size_t i = 0; i < fibers.size(); ++i) {
    const int block = static_cast<int>(i) / launch.threads;
    fibers[i].place = {static_cast<int>(i) % launch.threads, block, launch.blocks};
    fibers[i].block = &blocks[block];
    Prepare(&fibers[i]);
  }
  body = &kernel;
  longest_copy = launch.longest_copy;
  now = 0;
  std::vector<int> turns_in(warps), left_in(launch.blocks, launch.threads);
  size_t left = fibers.size();
  while (left > 0) {
    if (now++ == kMostTurns) return false;
    if (now % kTurnsOfAMood == 1) ChangeMoods(&turns_in);
    for (Block& block : blocks) LetCopiesCome(&block);
    bool first_wave = false;
    for (int b = 0; b < launch.blocks && b < launch.resident; ++b) first_wave |= left_in[b] > 0;
    const int first = static_cast<int>(Random() % warps);
    for (int i = 0; i < warps; ++i) {
      const int warp = (first + i) % warps, block = warp / warps_a_block;
      if (now % turns_in[warp] != 0 || (first_wave && block >= launch.resident)) continue;
      const int lane = static_cast<int>(Random() % kWarp);
      for (int j = 0; j < kWarp; ++j) {
        Fiber* fiber = &fibers[warp * kWarp + (lane + j) % kWarp];
        if (fiber->ended) continue;
        running = fiber;
        simt_switch(&scheduler, fiber->stack_pointer);
        if (!fiber->ended) continue;
        --left;
        --left_in[block];
      }
    }
  }
  return true;
}

char* Shared(uint32_t address, size_t bytes) {
  std::vector<char>& shared = ThisBlock().shared;
  if (address < kSharedBegin || address - kSharedBegin + bytes > shared.size()) {
    Fail("an access beyond shared memory");
  }
  return shared.data() + address - kSharedBegin;
}

char* DynamicShared() { return ThisBlock().shared.data(); }

const unsigned char* Exchange(const void* value, size_t bytes) {
  Warp& warp = ThisBlock().warps[Here().thread / kWarp];
  const unsigned exchange = warp.exchanges;
  unsigned char* lanes = warp.lanes[exchange % 2];
  std::memcpy(lanes + Here().thread % kWarp * kLaneBytes, value, bytes);
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.exchanges;
  }
  while (warp.exchanges == exchange) Yield();
  return lanes;
}

void StartCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 != 0 || bytes % 16 != 0) Fail("a bulk copy that is not aligned");
  // Whoever still reads there reads what is wrong.
  std::memset(Shared(to, bytes), 0xFF, bytes);
  const long comes_at = now + static_cast<long>(Random() % (longest_copy + 1));
  ThisBlock().copies.push_back({to, from, bytes, barrier, comes_at});
}

}  // namespace simt
