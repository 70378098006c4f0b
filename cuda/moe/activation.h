// The gated activation between the two products of an expert.
#pragma once

#include <cstdint>

namespace b12x {

enum class Activation : int32_t { kSilu = 0, kSwigluOai = 1 };

}  // namespace b12x
