// SPDX-License-Identifier: BSD-3-Clause
/// wait/: how a thread waits for an event that another thread, or another rank on this host, is
/// about to produce.
///
/// There is one policy. With a dedicated core, the waiter spins: it polls with a pause in between.
/// On a shared core, or once its pauses are used up, it yields the core between polls. When the
/// budget is exhausted, the `SpinWait` is over, and the waiter sleeps or leaves the work to another
/// thread:
///
///   SpinWait spin(SpinBudget::before_sleep(topology));
///   while (!poll()) {
///     if (!spin.pause(clock_now)) sleep_until_woken();
///   }
///
/// `SpinBudget` lists the budget of every waiter. The numbers are in core/tunables/tunables.cc
/// (link_spin, peer_pauses and so on). `topology.h` says whether ranks share cores. `yield_until`
/// waits for another thread of this process that is already executing the awaited step. `CoreOffer`
/// is for a poll nested in another component's wait loop. No other file pauses or yields. Depends
/// on base/ only and knows no ranks. Tests: `ctest -R '^wait\.'`.
#pragma once

#include <atomic>
#include <limits>
#include <thread>
#include <utility>

#include "core/tunables/tunables.h"
#include "core/wait/topology.h"
#include "muster/clock.h"

namespace muster {

/// Takes tens of nanoseconds and frees the core's execution units for its other hardware thread.
inline void pause_once() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::this_thread::yield();
#endif
}

/// Yields the core to any other thread that is ready to run on it.
inline void yield_core() noexcept { std::this_thread::yield(); }

/// Yields until `done()`. Only for a step that another thread of this process is about to finish.
template <class Done>
void yield_until(const Done& done) {
  while (!done()) yield_core();
}

namespace wait_detail {
inline constinit thread_local bool woke_sleeper = false;
inline constinit thread_local bool made_progress = false;
}  // namespace wait_detail

/// Records that this thread has just woken a sleeper. The scheduler may have queued the sleeper on
/// this thread's core, so this thread's next `SpinWait` starts with a yield.
inline void note_wakeup() noexcept { wait_detail::woke_sleeper = true; }
/// Returns whether a wakeup was recorded since the last call on this thread, and clears it.
inline bool take_wakeup() noexcept { return std::exchange(wait_detail::woke_sleeper, false); }

/// Records that the awaited work has advanced but not finished: this thread polls for another full
/// budget before it sleeps. Not for a thread that only drives other threads' work, since that would
/// take cores from ranks that compute.
inline void note_progress() noexcept { wait_detail::made_progress = true; }
/// Returns whether progress was recorded since the last call on this thread, and clears it.
inline bool take_progress() noexcept { return std::exchange(wait_detail::made_progress, false); }

/// How long a wait spins and yields before it is over.
struct SpinBudget {
  static constexpr int kNoLimit = std::numeric_limits<int>::max();

  int pauses = 0;            ///< maximum number of pauses; a poll follows each
  Duration spin{};           ///< time limit for the pauses, from the first poll; zero: no limit
  Duration yield{};          ///< yield after the pauses, until this long after the first poll
  int pauses_on_shared = 0;  ///< extra pauses on a shared core between two yields (`keeps_core`)

  /// For anything that arrives over links. Afterwards the thread sleeps (`Fabric::wait`).
  static SpinBudget before_sleep(const Topology& topology);
  /// For all peers of a small call, or for one peer's message in shared memory. Afterwards the wait
  /// continues in `Fabric::wait`.
  static SpinBudget for_peers(const Topology& topology);
  /// For a call that has already started; its owner checks the clock.
  static SpinBudget for_started_call(const Topology& topology);
  /// For a server's reply on a socket. Afterwards the thread blocks in recv.
  static SpinBudget for_answer();
};

/// One wait of one thread.
class SpinWait {
 public:
  explicit SpinWait(const SpinBudget& budget) : budget_(budget) {}

  /// Call between two polls. Returns false when the budget is used up. `now` returns the time; it
  /// is called only if the budget has a time limit. `pauses`: number of pauses in a row.
  /// `keeps_core`: no awaited rank shares this core.
  template <class Now>
  bool pause(const Now& now, int pauses = 1, bool keeps_core = false) {
    if (finished_) return false;
    if (paused_ < budget_.pauses &&
        (budget_.spin == Duration::zero() || since_first(now()) < budget_.spin)) {
      if (paused_ == 0 && take_wakeup()) {
        yield_core();
        pauses = 1;
      } else {
        for (int i = 0; i < pauses; ++i) pause_once();
      }
      paused_ += pauses;
      return true;
    }
    if (keeps_core && ++kept_ <= budget_.pauses_on_shared) {
      pause_once();
      return true;
    }
    kept_ = 0;
    if (budget_.yield == Duration::zero() || since_first(now()) >= budget_.yield) return false;
    yield_core();
    return true;
  }

  /// Something arrived: a shared core may again be kept for `pauses_on_shared` pauses.
  void keep_core_anew() { kept_ = 0; }
  /// Something arrived: start over with the full budget.
  void restart() {
    paused_ = 0;
    first_ = TimePoint::max();
    finished_ = false;
  }
  /// Ends the wait, whatever is left of the budget.
  void finish() { finished_ = true; }

 private:
  Duration since_first(TimePoint now) {
    if (first_ == TimePoint::max()) first_ = now;
    return now - first_;
  }

  const SpinBudget budget_;
  int paused_ = 0;
  int kept_ = 0;  // polls since the last yield
  bool finished_ = false;
  TimePoint first_ = TimePoint::max();  // first time the clock was read
};

/// Yields for a poll nested in another component's wait loop: the peer that owes the answer may
/// need this core. It yields after a number of polls without news. A peer that polls on another
/// core answers before that. A peer on this core can answer only after the yield; once that has
/// happened, the next yield comes after 2 polls. Use one object per wait; the learned poll count
/// lives in `polls`, which several threads may share.
class CoreOffer {
 public:
  static int many_polls() { return static_cast<int>(tunables().offer_polls); }

  /// `polls`: initialize with `many_polls()`.
  explicit CoreOffer(std::atomic<int>& polls) : polls_(polls) {}
  /// Call after each poll.
  void polled(bool news);

 private:
  std::atomic<int>& polls_;
  int idle_ = 0;         // polls without news
  bool helped_ = false;  // the last yield ran the awaited peer
};

}  // namespace muster
