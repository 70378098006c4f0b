#include "ffi/host/scratch.h"

#include <algorithm>

#include "ffi/host/rows.h"

namespace b12x::host {
namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

Scratch::Scratch(const MoeProblem& p) {
  const int64_t routes = p.slab_tokens * p.top_k;
  // XLA promises no more than the alignment of a maximal scalar.
  const auto address = reinterpret_cast<uintptr_t>(p.scratch);
  char* const begin =
      static_cast<char*>(p.scratch) + (kAlignment - address % kAlignment) % kAlignment;
  int64_t offset = 0;
  const auto take = [&](int64_t size) {
    char* const part = begin + offset;
    offset += (size + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  };
  x_rows = take(p.slab_tokens * RowBytes(p.recipe, p.hidden));
  h_rows = take(routes * RowBytes(p.recipe, p.intermediate));
  y = reinterpret_cast<float*>(take(routes * p.hidden * 4));
  sorted_routes = reinterpret_cast<int32_t*>(take(routes * 4));
  expert_begin = reinterpret_cast<int32_t*>(take((p.num_experts + 1) * 4));
  experts = reinterpret_cast<int32_t*>(take(std::min(routes, p.num_experts) * 4));
  bytes = offset + kAlignment;
}

int64_t MoeScratchBytes(const MoeProblem& problem) { return Scratch(problem).bytes; }

}  // namespace b12x::host
