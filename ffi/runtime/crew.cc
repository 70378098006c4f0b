#include "ffi/runtime/crew.h"

#include <memory>
#include <thread>
#include <utility>

namespace b12x::runtime {

Crew& Crew::Get() {
  // Never destroyed: its threads run until the process exits.
  static Crew* const crew = std::make_unique<Crew>().release();
  return *crew;
}

void Crew::Run(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(work));
  if (waiting_.size() > idle_) {
    ++idle_;  // on behalf of the new thread
    std::thread([this] { Serve(); }).detach();
  } else {
    changed_.notify_one();
  }
}

void Crew::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !waiting_.empty(); });
    const std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    --idle_;
    lock.unlock();
    work();
    lock.lock();
    ++idle_;
  }
}

}  // namespace b12x::runtime
