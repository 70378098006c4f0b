// How the processes of a pool tell each other where their memory is: done by whoever opens the
// pool, because it goes through the service that connects the processes.
#ifndef JAX_B12X_FFI_RUNTIME_EXCHANGE_H_
#define JAX_B12X_FFI_RUNTIME_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace b12x::runtime {

struct Exchange {
  // Offers a new channel's memory on this process's devices (ordinal, address) to the peers; does
  // not wait for them. Called when a program is made.
  std::function<void(int64_t channel, const std::string& op, const std::string& program,
                     int64_t site, const std::string& lane, int64_t bytes,
                     const std::vector<std::tuple<int, uintptr_t>>& slabs)>
      publish;
  // Returns where this process's devices see their peers' memory (ordinal, rank, address); waits
  // for the peers to offer it. Called before the first execution.
  std::function<std::vector<std::tuple<int, int, uintptr_t>>(int64_t channel)> connect;
};

}  // namespace b12x::runtime

#endif  // JAX_B12X_FFI_RUNTIME_EXCHANGE_H_
