/// Where the threads of one rank sleep, and how others wake them.
///
/// A mailbox is one cache line. Local peers have it mapped (it lies in the host region where there
/// is one), so that whoever publishes something for a rank (bytes in a shared ring, a control line,
/// an answer) wakes it without a system call where nobody sleeps. Sockets' news reach it through
/// the watcher, which wakes it after each pass that got on. No wake-up is lost: a sleeper announces
/// itself, then looks again, then sleeps; a waker publishes, then looks for sleepers (both with
/// sequentially consistent order in between; the sleeper pays for both where it sends barriers).
#pragma once

#include <atomic>
#include <cstdint>

#include "muster/base/clock.h"

namespace muster::shm {

struct alignas(64) Mailbox {
  std::atomic<std::uint32_t> word{0};  ///< the futex; grows by one with every wake-up
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint64_t> heartbeat{0};  ///< grows by one per beat of the owner's watcher
  std::atomic<std::uint32_t> pid{0};        ///< 0: not there yet
  std::atomic<std::uint32_t> aborted{
      0};  ///< the owner's own word that it has left (its end is no death): one of the two below
  std::atomic<std::uint32_t> troubled{
      0};  ///< the owner knows of a failure: if it ends now, that is why
  /// The owner's sleepers send a barrier (`base/host_barrier.h`) between their announcement and
  /// their look: who publishes for them and takes such barriers needs no fence of its own before it
  /// looks for sleepers. Set before the owner has met anybody, if at all.
  std::atomic<std::uint32_t> sends_barriers{0};

  static constexpr std::uint32_t kLeft = 1;  ///< in good order
  /// Its process ended and had not closed its groups.
  static constexpr std::uint32_t kUnclosed = 2;  // limit: a name

  /// After publishing: wakes every sleeper; costs a fence and a load where there is none.
  void wake();
  /// The same without the fence, which the caller has passed since it published, or the sleepers
  /// send.
  void wake_announced() {
    if (sleepers.load(std::memory_order_relaxed) != 0) wake();
  }
  /// Announces a sleeper; returns the ticket for `sleep`. The caller must then look once more at
  /// what it waits for.
  std::uint32_t prepare_sleep();
  /// Sleeps until woken or for `limit` (may return early). Ends the announcement.
  void sleep(std::uint32_t ticket, Duration limit);
  /// Ends the announcement without sleeping.
  void cancel_sleep();
};

}  // namespace muster::shm
