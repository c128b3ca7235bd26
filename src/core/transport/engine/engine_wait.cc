// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/engine/engine_wait.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/transport/link/send_batch.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::transport {
namespace {

constexpr Duration kLongestSleep =
    std::chrono::milliseconds(100);  // limit: guards against a lost wake-up

}  // namespace

/// Counts the polling threads, so that the watcher does not touch the links.
class EngineWait::Poller {
 public:
  explicit Poller(EngineWait& wait) : wait_(wait) { enter(); }
  ~Poller() {
    if (!active_) return;
    leave();
    // Sleepers rely on the watcher from here on.
    if (wait_.sleepers_.load() > 0) wait_.loop_.rearm_watcher();
  }
  void enter() {
    wait_.loop_.enter_poller();
    active_ = true;
  }
  void leave() {
    wait_.loop_.leave_poller();
    active_ = false;
  }

 private:
  EngineWait& wait_;
  bool active_ = false;
};

bool EngineWait::wait(const std::function<bool()>& done, TimePoint deadline) {
  take_progress();  // discard progress noted during an earlier wait
  if (done()) return true;
  if (engine_.forked()) return false;
  const SendBatch::Suspension batches;
  Poller poller(*this);
  SpinWait spin(SpinBudget::before_sleep(engine_.topology));
  for (;;) {
    TimePoint now;
    const PassLoop::Looked looked = loop_.look(false, now);
    if (done()) return true;
    if (now >= deadline) return false;
    if (take_progress() || looked == PassLoop::Looked::moved) {
      spin.restart();
      continue;
    }
    if (engine_.options.idle) {
      engine_.options.idle(std::min(deadline, loop_.next_wake()));
      continue;
    }
    const int pauses = looked == PassLoop::Looked::busy ? fixed::kBusyPauses : fixed::kPassPauses;
    if (spin.pause([now] { return now; }, pauses)) continue;
    poller.leave();
    const Slept slept = sleep_until_news(std::min(deadline, now + kLongestSleep), done);
    poller.enter();
    if (slept == Slept::done) return true;
    // A spurious wake-up: poll once, then sleep again.
    slept == Slept::progress ? spin.restart() : spin.finish();
  }
}

bool EngineWait::spin_for_peer(int rank) const {
  const int position =
      engine_.topology.dedicated() && engine_.region != nullptr && !engine_.forked()
          ? engine_.region_position[static_cast<std::size_t>(rank)]
          : -1;
  if (position < 0) return false;
  SpinWait spin(SpinBudget::for_peers(engine_.topology));
  do {
    if (engine_.region->holds_bytes_from(position)) return true;
  } while (spin.pause([this] { return engine_.now(); }));
  return false;
}

/// Announces the sleeper, makes one more pass, then sleeps, so that no wake-up is lost.
EngineWait::Slept EngineWait::sleep_until_news(TimePoint until, const std::function<bool()>& done) {
  shm::Mailbox& mailbox = engine_.mailbox();
  // Both counts end with this call, also if `done` throws or unwinds: others wake who is counted.
  struct CountedSleeper {
    CountedSleeper(std::atomic<int>& all, shm::Mailbox& box)
        : sleepers(all), mailbox(box), ticket((sleepers.fetch_add(1), mailbox.prepare_sleep())) {}
    ~CountedSleeper() {
      if (!has_slept) mailbox.cancel_sleep();
      sleepers.fetch_sub(1);
    }
    std::atomic<int>& sleepers;
    shm::Mailbox& mailbox;
    const std::uint32_t ticket;
    bool has_slept = false;
  } sleeper(sleepers_, mailbox);
  const bool moved = loop_.poll(true);
  bool finished = done();
  bool progress = take_progress();
  if (!moved && !finished && !progress) {
    loop_.rearm_watcher();
    sleeper.has_slept = true;
    mailbox.sleep(sleeper.ticket, until - engine_.now());
    // The waker has usually published everything awaited, in memory or through a pass of the
    // watcher. Check that before making a pass here.
    finished = done();
    progress = take_progress();
  }
  return finished ? Slept::done : progress ? Slept::progress : Slept::nothing;
}

Status Watcher::start(int rank) {
  auto thread = start_thread("the thread that watches the links", [this, rank] { run(rank); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void Watcher::stop() {
  if (!thread_.joinable()) return;
  if (mark_.forked()) {
    thread_.detach();
    return;
  }
  stop_.store(true);
  signal_.kick();
  thread_.join();
}

void Watcher::run(int rank) {
  pthread_setname_np(pthread_self(), "muster-watcher");
  set_log_rank(rank);
  TimePoint wake = loop_.watch_pass();
  std::uint64_t polls = loop_.polls();
  while (!stop_.load()) {
    const TimePoint now = steady_clock().now();
    // While user threads poll, input does not wake the watcher; it only checks whether they still
    // poll.
    if (!signal_.armed()) wake = std::min(wake, now + tunables().progress_tick);
    signal_.sleep(now, wake);
    if (stop_.load()) return;
    // A user thread polls, or has polled since the last check, and handles the input.
    const std::uint64_t polls_now = loop_.polls();
    const bool polled = loop_.pollers_active() || (!signal_.armed() && polls_now != polls);
    polls = polls_now;
    wake = loop_.watch_pass();
    polls = loop_.polls();
    if (!polled) loop_.arm_watcher();
  }
}

}  // namespace muster::transport
