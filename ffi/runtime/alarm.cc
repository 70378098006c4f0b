#include "ffi/runtime/alarm.h"

#include <memory>
#include <thread>
#include <utility>

namespace b12x::runtime {

Alarm& Alarm::Get() {
  // Never destroyed: its thread runs until the process exits.
  static Alarm* const alarm = std::make_unique<Alarm>().release();
  return *alarm;
}

void Alarm::Set(Time time, std::function<void()> ring) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool first = pending_.empty() || time < pending_.begin()->first;
  pending_.emplace(time, std::move(ring));
  if (!running_) {
    running_ = true;
    std::thread([this] { Run(); }).detach();
  }
  // Alarms mostly come in order: the thread only has to wake when its next one changed.
  if (first) changed_.notify_one();
}

void Alarm::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (pending_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const auto next = pending_.begin();
    const Time time = next->first;
    if (std::chrono::steady_clock::now() < time) {
      changed_.wait_until(lock, time);
      continue;
    }
    const std::function<void()> ring = std::move(next->second);
    pending_.erase(next);
    lock.unlock();
    ring();
    lock.lock();
  }
}

}  // namespace b12x::runtime
