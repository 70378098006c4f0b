#include "ffi/runtime/meeting.h"

#include <chrono>
#include <thread>

#include "ffi/runtime/alarm.h"
#include "ffi/runtime/crew.h"

namespace b12x::runtime {

void MeetingPlace::Arrive(const std::shared_ptr<Channel>& channel, int group, int64_t run, int rank,
                          Arrival arrival, const Combine& combine) {
  std::vector<Arrival> complete;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // Nobody waits for this rank: whoever did was released.
    if (channel->refused()) {
      lock.unlock();
      arrival.fill_nan();
      arrival.done(false);
      return;
    }
    const RunKey key{group, run};
    Run& current = runs_[key];
    current.next.resize(world_size_);
    const int64_t number = current.next[rank]++;
    Meeting& meeting = current.meetings[number];
    if (meeting.count == 0) {
      meeting.arrivals.resize(world_size_);
      meeting.present.resize(world_size_);
      meeting.serial = ++serials_;
      std::weak_ptr<MeetingPlace> weak = weak_from_this();
      Alarm::Get().Set(std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms_),
                       [weak, channel, key, number, serial = meeting.serial] {
                         if (const auto self = weak.lock())
                           self->Expire(channel, key, number, serial);
                       });
    }
    meeting.arrivals[rank] = std::move(arrival);
    meeting.present[rank] = true;
    if (++meeting.count < world_size_) return;
    complete = std::move(meeting.arrivals);
    current.meetings.erase(number);
    // All ranks came equally often, so that counting can start again.
    if (current.meetings.empty()) runs_.erase(key);
  }
  combine(complete);
  // Whoever waits for a rank goes on inside `done`, and may come to a call that blocks until other
  // ranks go on: each needs a thread. Ours has not begun to wait.
  for (int other = 0; other < world_size_; ++other) {
    if (other != rank) {
      Crew::Get().Run([done = std::move(complete[other].done)] { done(true); });
    }
  }
  complete[rank].done(true);
}

void MeetingPlace::Expire(const std::shared_ptr<Channel>& channel, RunKey key, int64_t number,
                          uint64_t serial) {
  std::vector<Arrival> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto run = runs_.find(key);
    if (run == runs_.end()) return;
    const auto meeting = run->second.meetings.find(number);
    if (meeting == run->second.meetings.end() || meeting->second.serial != serial) return;
    std::string missing;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!meeting->second.present[rank]) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    channel->Poison("pool '" + pool_ + "', " + channel->Name() + ": rank " + missing +
                    " did not arrive within the timeout of " + std::to_string(timeout_ms_) +
                    " ms; the channel is poisoned and its result is NaN");
    waiting = TakeWaiting();
  }
  Fail(std::move(waiting));
}

std::vector<Arrival> MeetingPlace::TakeWaiting() {
  std::vector<Arrival> waiting;
  for (auto& [key, run] : runs_) {
    for (auto& [number, meeting] : run.meetings) {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (meeting.present[rank]) waiting.push_back(std::move(meeting.arrivals[rank]));
      }
    }
  }
  runs_.clear();
  return waiting;
}

void MeetingPlace::Fail(std::vector<Arrival> arrivals) {
  for (Arrival& each : arrivals) {
    each.fill_nan();
    Crew::Get().Run([done = std::move(each.done)] { done(false); });
  }
}

// A rank that is refused may never come here: its program ends at the first refusal.
void MeetingPlace::Release() {
  std::vector<Arrival> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting = TakeWaiting();
  }
  Fail(std::move(waiting));
}

void MeetingPlace::Quiesce(int rank) {
  // A meeting ends by itself within the timeout.
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms_ + 500);
  while (true) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (runs_.empty()) return;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      throw ChannelError("pool '" + pool_ + "': a call is still in flight on rank " +
                         std::to_string(rank));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The ranks read each other's buffers in place: there is nothing to unmap or free.
void MeetingPlace::CloseImports(int /*rank*/) {}
void MeetingPlace::FreeExports(int /*rank*/) {}

Pool::MakeMemory MakeMeetingPlaces(Exchange /*exchange*/) {
  return [](const Pool& pool, int64_t /*id*/, const ChannelSpec& /*spec*/) {
    const PoolOptions& options = pool.options();
    return std::make_shared<MeetingPlace>(options.name, options.world_size, options.timeout_ms);
  };
}

}  // namespace b12x::runtime
