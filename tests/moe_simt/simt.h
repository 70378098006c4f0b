// Runs the threads of one kernel as fibers, in turns, on one CPU thread, with what the MoE kernels
// need of a GPU: named barriers, shared-memory barriers, exchanges of a warp, and copies that come
// late. Warps get their turns in another order each time, and some of them seldom. A kernel that
// does not end is stopped and told.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

namespace simt {

// A shared-memory barrier: a phase ends when all have arrived and all announced bytes have come.
struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;

  void EndPhaseIfComplete() {
    if (pending != 0 || bytes != 0) return;
    ++phase;
    pending = count;
  }
};

struct NamedBarrier {
  int arrived = 0;
  unsigned generation = 0;
  bool all = true;
  bool result[2] = {true, true};
};

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes, barrier;
  long comes_at;
};

inline constexpr int kWarp = 32;
inline constexpr size_t kLaneBytes = 32;

struct Warp {
  // Two, since a lane may come to the next exchange while another reads of this one.
  unsigned char lanes[2][kWarp * kLaneBytes];
  int arrived = 0;
  unsigned exchanges = 0;
};

struct Block {
  std::vector<char> shared;
  std::map<uint32_t, Barrier> barriers;
  NamedBarrier named[16];
  std::vector<Copy> copies;
  std::vector<Warp> warps;
};

struct Place {
  int thread, block, blocks;
};

// Of the thread that runs.
const Place& Here();
Block& ThisBlock();
// Turns since the kernel began.
long Now();
uint32_t Random();
// Lets other threads run.
void Yield();
// Ends the program: the kernel does what no kernel may.
[[noreturn]] void Fail(const char* what);

struct Launch {
  int blocks, threads, shared_bytes;
  int longest_copy = 20;   // turns
  int resident = 1 << 30;  // blocks that run at once; the others begin when these have ended
};
// False when the kernel does not end.
bool Run(const Launch& launch, const std::function<void()>& kernel);

// Shared memory has addresses of its own, 0 is none of them.
inline constexpr uint32_t kSharedBegin = 1024;
char* Shared(uint32_t address, size_t bytes);
char* DynamicShared();

// Starts a copy to shared memory, which a barrier counts in.
void StartCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);

// Waits for the warp; returns what its lanes brought, kLaneBytes apart.
const unsigned char* Exchange(const void* value, size_t bytes);

template <typename T>
T Lane(const T& value, int lane) {
  static_assert(sizeof(T) <= kLaneBytes);
  T result;
  std::memcpy(&result, Exchange(&value, sizeof(T)) + lane * kLaneBytes, sizeof(T));
  return result;
}

}  // namespace simt
