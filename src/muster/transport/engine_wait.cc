/// How threads wait: passes while there is something to do, then a pause, then sleep.
#include <algorithm>
#include <thread>
#include <utility>

#include "muster/transport/engine.h"
#include "muster/transport/headway.h"
#include "muster/transport/watcher.h"

namespace muster::transport {

/// Counts the threads that poll, so that the watcher keeps away.
class ActivePoller {
 public:
  explicit ActivePoller(Engine& engine) : engine_(engine) { enter(); }
  ~ActivePoller() {
    if (!active_) return;
    leave();
    // Sleepers rely on the watcher from here on.
    if (engine_.sleepers_.load() > 0 && engine_.watcher_) engine_.watcher_->rearm();
  }
  void enter() {
    engine_.active_pollers_.fetch_add(1);
    active_ = true;
  }
  void leave() {
    engine_.active_pollers_.fetch_sub(1);
    active_ = false;
  }

 private:
  Engine& engine_;
  bool active_ = false;
};

namespace {

// How long a waiting thread keeps its core before it gives it away, and then gives it away before
// it sleeps. Longer than a sleeper takes to come back, which a machine that is shared may make some
// hundred microseconds: else ranks that have slept once would find each other asleep at every call
// from then on.
constexpr Duration kSpin = std::chrono::microseconds(40);
constexpr Duration kYield = std::chrono::milliseconds(1);
constexpr Duration kLongestSleep = std::chrono::milliseconds(100);

/// Shorter for the thread that looks itself: what comes meanwhile is seen late by as much.
void pause_briefly(bool others_look) {
  for (int i = others_look ? 8 : 2; i > 0; --i) pause_once();
}

}  // namespace

bool Engine::wait(const std::function<bool()>& done, TimePoint deadline) {
  take_headway();  // of an earlier wait
  if (done()) return true;
  if (forked()) return false;
  const Together::Aside aside;
  ActivePoller active(*this);
  TimePoint idle_since = TimePoint::max();
  for (;;) {
    TimePoint now;
    const Looked looked = look(false, now);
    if (done()) return true;
    if (now >= deadline) return false;
    if (take_headway() || looked == Looked::moved) {
      idle_since = TimePoint::max();
      continue;
    }
    if (options_.idle) {
      TimePoint until = deadline;
      {
        Entry entry(*this);
        until = std::min(until, next_wake());
      }
      options_.idle(until);
      continue;
    }
    if (idle_since == TimePoint::max()) {
      idle_since = now;
      if (take_wakeup()) std::this_thread::yield();
    }
    if (may_spin_ && now - idle_since < kSpin) {
      pause_briefly(looked == Looked::busy);
      continue;
    }
    if (now - idle_since < kYield) {
      std::this_thread::yield();
      continue;
    }
    active.leave();
    bool finished = false;
    const bool got_on = sleep_until_news(std::min(deadline, now + kLongestSleep), done, finished);
    active.enter();
    if (finished) return true;
    // Woken for nothing: look once, sleep again.
    idle_since = got_on ? TimePoint::max() : clock().now() - kYield;
  }
}

bool Engine::await_briefly(int rank) {
  constexpr int kLooks = 200;
  const int place = may_spin_ && region_ != nullptr && !forked()
                        ? local_position_[static_cast<std::size_t>(rank)]
                        : -1;
  if (place < 0) return false;
  for (int looks = 0; looks < kLooks; ++looks) {
    if (region_->holds_bytes_from(place)) return true;
    looks == 0 && take_wakeup() ? std::this_thread::yield() : pause_once();
  }
  return false;
}

void Engine::take_in(int rank) {
  if (forked() || !lock_.try_lock()) return;
  const auto link = std::find(plain_.begin(), plain_.end(), find_link(rank));
  if (link != plain_.end() && *link != nullptr) {
    read_plain(**link);
    std::erase(plain_, nullptr);
  }
  leave_entry();
}

bool Engine::sleep_until_news(TimePoint until, const std::function<bool()>& done, bool& finished) {
  shm::Mailbox& mailbox = connector_->mailbox();
  sleepers_.fetch_add(1);
  const std::uint32_t ticket = mailbox.prepare_sleep();
  const bool moved = poll(true);
  finished = done();
  bool got_on = take_headway();
  if (moved || finished || got_on) {
    mailbox.cancel_sleep();
  } else {
    if (watcher_) watcher_->rearm();
    mailbox.sleep(ticket, until - clock().now());
    // Who woke us has mostly published all there was to wait for, in memory or by a pass of the
    // watcher: no pass of our own before that.
    finished = done();
    got_on = take_headway();
  }
  sleepers_.fetch_sub(1);
  return got_on;
}

}  // namespace muster::transport
