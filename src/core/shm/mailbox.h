// SPDX-License-Identifier: BSD-3-Clause
/// How the threads of one rank sleep and how other ranks and threads wake them.
///
/// A mailbox is one cache line. Local peers map it (it lies in the host region if there is one), so
/// a publisher of ring bytes, a control line or an answer wakes the rank without a system call when
/// no thread sleeps. Socket events reach it through the watcher, which wakes it after each pass
/// that made progress. No wakeup is lost: a sleeper announces itself, polls once more, then sleeps;
/// a waker publishes, then checks for sleepers. Both need sequentially consistent order between the
/// two steps; a sleeper that sends barriers provides it for both.
#pragma once

#include <atomic>
#include <cstdint>

#include "muster/clock.h"

namespace muster::shm {

struct alignas(64) Mailbox {
  std::atomic<std::uint32_t> word{0};  ///< the futex word; incremented by every wakeup
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint64_t> heartbeat{0};  ///< incremented by each beat of the owner's watcher
  std::atomic<std::uint32_t> pid{0};        ///< 0: not present yet
  /// Set by an owner that leaves, so its end is no death: one of the two constants below.
  std::atomic<std::uint32_t> aborted{0};
  /// The owner knows of a failure: if it ends now, that is the cause.
  std::atomic<std::uint32_t> troubled{0};
  /// The owner's sleepers send a barrier (`core/base/threads/host_barrier.h`) between announcement
  /// and last poll. A publisher that receives such barriers needs no fence before it checks for
  /// sleepers. Set before the owner meets any peer, if at all.
  std::atomic<std::uint32_t> sends_barriers{0};

  static constexpr std::uint32_t kLeft = 1;  ///< closed cleanly
  /// The process ended without closing its groups.
  static constexpr std::uint32_t kUnclosed = 2;  // limit: a name

  /// Call after publishing. Wakes every sleeper; costs a fence and a load if there is none.
  void wake();
  /// The same without the fence: either the caller has passed one since it published, or the
  /// sleepers send barriers.
  void wake_announced() {
    if (sleepers.load(std::memory_order_relaxed) != 0) wake();
  }
  /// Announces a sleeper and returns the ticket for `sleep`. The caller must poll once more before
  /// it sleeps.
  std::uint32_t prepare_sleep();
  /// Sleeps until woken or for `limit`; may return early. Withdraws the announcement.
  void sleep(std::uint32_t ticket, Duration limit);
  /// Withdraws the announcement without sleeping.
  void cancel_sleep();
};

}  // namespace muster::shm
