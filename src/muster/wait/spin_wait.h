/// wait/: how a thread waits for what another thread, or another rank of the host, does soon.
///
/// There is one policy. On a core of its own a waiter polls with a pause between; on a core that
/// it shares, and once its pauses are used up, it gives the core away between polls; then the
/// `SpinWait` is over, and the waiter sleeps or leaves the rest to somebody else:
///
///   SpinWait spin(SpinBudget::before_sleep(topology));
///   while (!poll()) {
///     if (!spin.pause(clock_now)) sleep_until_woken();
///   }
///
/// `SpinBudget` has the budget of every waiter, base/tunables.cc the numbers (link_spin,
/// peer_pauses and the like), and `topology.h` says whether ranks share cores. `yield_until` waits
/// for another thread of this process that is in the middle of what is waited for. `CoreOffer` is
/// for a poll within somebody else's wait. No other file pauses or yields. Stands on base/ alone
/// and knows no rank: test it by `ctest -R '^wait\.'`.
#pragma once

#include <limits>
#include <thread>
#include <utility>

#include "muster/base/clock.h"
#include "muster/wait/topology.h"

namespace muster {

/// Some tens of nanoseconds; leaves the core's units to its other hardware thread meanwhile.
inline void pause_once() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::this_thread::yield();
#endif
}

/// Gives the core to any other thread that is ready to run on it.
inline void yield_core() noexcept { std::this_thread::yield(); }

/// Returns once `done()`. Only for what another thread of this process is about to do.
template <class Done>
void yield_until(const Done& done) {
  while (!done()) yield_core();
}

namespace wait_detail {
inline constinit thread_local bool woke_sleeper = false;
inline constinit thread_local bool made_progress = false;
}  // namespace wait_detail

/// This thread has just woken a sleeper, which may have been put on this thread's core, behind it.
/// Its next `SpinWait` begins by giving the core away.
inline void note_wakeup() noexcept { wait_detail::woke_sleeper = true; }
/// Whether that was noted since this thread last asked.
inline bool take_wakeup() noexcept { return std::exchange(wait_detail::woke_sleeper, false); }

/// What this thread waits for has got on, though not to its end: it keeps polling as long again
/// before it sleeps. Not for a thread that only looks after others' work: it would take the cores
/// of those that compute.
inline void note_progress() noexcept { wait_detail::made_progress = true; }
/// Whether that was noted since this thread last asked.
inline bool take_progress() noexcept { return std::exchange(wait_detail::made_progress, false); }

/// How far a wait goes before it is over.
struct SpinBudget {
  static constexpr int kNoLimit = std::numeric_limits<int>::max();

  int pauses = 0;            ///< at most so many, each followed by a poll,
  Duration spin{};           ///< and for so long from the first; zero: the count alone decides
  Duration yield{};          ///< then the core is given away until so long after the first poll
  int pauses_on_shared = 0;  ///< a shared core is kept so long where the waiter asks for that

  /// For whatever comes over links: then the thread sleeps (`Fabric::wait`).
  static SpinBudget before_sleep(const Topology& topology);
  /// For all members of a small call, or for one peer's message in shared memory: then the wait
  /// goes on in `Fabric::wait`.
  static SpinBudget for_peers(const Topology& topology);
  /// For a call that is under way already; its owner looks at the clock.
  static SpinBudget for_started_call(const Topology& topology);
  /// For a server's answer on a socket: then the thread blocks in recv.
  static SpinBudget for_answer();
};

/// One wait. Of one thread.
class SpinWait {
 public:
  explicit SpinWait(const SpinBudget& budget) : budget_(budget) {}

  /// Between two polls. False: the budget is used up. `now` gives the time and is asked only where
  /// the budget has a time. `pauses`: so many in a row. `keeps_core`: nobody who shares this core
  /// is waited for.
  template <class Now>
  bool pause(const Now& now, int pauses = 1, bool keeps_core = false) {
    if (over_) return false;
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

  /// Something has come: a shared core is kept anew for what is still missing.
  void keep_core_anew() { kept_ = 0; }
  /// Something has come: the whole budget counts anew.
  void restart() {
    paused_ = 0;
    first_ = TimePoint::max();
    over_ = false;
  }
  /// The budget is used up, whatever is left of it.
  void finish() { over_ = true; }

 private:
  Duration since_first(TimePoint now) {
    if (first_ == TimePoint::max()) first_ = now;
    return now - first_;
  }

  const SpinBudget budget_;
  int paused_ = 0;
  int kept_ = 0;  // polls since the core was last given away
  bool over_ = false;
  TimePoint first_ = TimePoint::max();  // when the time was asked first
};

}  // namespace muster
