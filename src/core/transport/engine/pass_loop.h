// SPDX-License-Identifier: BSD-3-Clause
/// Poll passes over connector, links and timers, under the engine's one lock. Private to
/// `transport/`.
///
/// A pass polls the connector, the links and the clock once and never blocks. Threads that wait
/// make passes one after another (`EngineWait`); while none does, the watcher does. The lock is
/// held for one pass or one call and never while waiting. Nothing under it calls user code.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/transport/engine/engine_context.h"
#include "core/transport/engine/epoll_sets.h"
#include "core/transport/link/links.h"

namespace muster::transport {

/// Work that is due by the clock (`PassState::next_duty`).
class TimedDuties {
 public:
  virtual void on_due(TimePoint now) = 0;

 protected:
  ~TimedDuties() = default;
};

class PassLoop {
 public:
  PassLoop(EngineContext& engine, Links& links, TimedDuties& duties)
      : engine_(engine), links_(links), duties_(duties) {}

  /// Holds the lock. At its end queued frames are written, and sleepers are woken if something was
  /// completed. In a forked child it does nothing.
  class LoopEntry {
   public:
    explicit LoopEntry(PassLoop& loop) : loop_(loop), held_(!loop.engine_.forked()) {
      if (held_) loop_.lock_.lock();
    }
    ~LoopEntry() {
      if (held_) loop_.release();
    }
    LoopEntry(const LoopEntry&) = delete;
    LoopEntry& operator=(const LoopEntry&) = delete;

   private:
    PassLoop& loop_;
    const bool held_;
  };

  enum class Looked : std::uint8_t {
    busy,  ///< another thread makes a pass
    idle,
    moved,
  };
  /// One pass; `now` is when it began. `thorough`: waits for the lock, and looks at all
  /// descriptors.
  Looked look(bool thorough, TimePoint& now);
  bool poll(bool thorough) {
    TimePoint now;
    return look(thorough, now) == Looked::moved;
  }
  /// Reads what has come from `rank` on a link without a descriptor, and looks at nothing else.
  void poll_peer(int rank);

  // Polling threads. The watcher does not touch the links while there are any.
  void enter_poller() { active_pollers_.fetch_add(1); }
  void leave_poller() { active_pollers_.fetch_sub(1); }
  bool pollers_active() const { return active_pollers_.load(std::memory_order_relaxed) > 0; }
  std::uint64_t polls() const { return polls_.load(std::memory_order_relaxed); }
  /// When a waiting simulated rank must poll again without an event.
  TimePoint next_wake();

  // The watcher.
  Status open_watcher_signal() { return signal_.open(links_.poller.descriptor()); }
  WatcherSignal& watcher_signal() { return signal_; }
  /// One pass and the work that is due. Returns when the watcher must be called again.
  TimePoint watch_pass();
  /// From here on input on any link wakes the watcher.
  void arm_watcher();
  /// The same for a thread that stops polling; one atomic load if the watcher is armed.
  void rearm_watcher() {
    if (signal_.is_open() && !signal_.armed()) arm_watcher();
  }

 private:
  bool pass();
  void release();
  bool looks_at_plain() const;
  TimePoint due() const;
  bool watcher_oversleeps();

  EngineContext& engine_;
  Links& links_;
  TimedDuties& duties_;
  // The engine's lock. No lock of an upper layer is taken under it; mailboxes are woken and the
  // watcher is kicked after it is released.
  PassLock lock_;
  std::atomic<int> active_pollers_{0};
  std::atomic<std::uint64_t> polls_{0};  // changed under the lock, read without it

  WatcherSignal signal_;  // open while there is a watcher
  /// The watcher's last look. Under the lock.
  struct {
    std::uint64_t polls = 0;
    TimePoint news = TimePoint::min();   // it found progress, or that a thread had polled
    TimePoint wakes = TimePoint::min();  // when it will look again by itself
    bool knows_plain = false;            // whether it does so because of links without descriptor
  } watched_;
};

}  // namespace muster::transport
