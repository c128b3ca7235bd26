// SPDX-License-Identifier: BSD-3-Clause
/// A lock biased to the first thread that takes it.
///
/// That thread, the owner, enters and leaves by two stores and a load, without an atomic
/// read-modify-write. Another thread first revokes the bias: it sends a barrier (`host_barrier.h`)
/// and waits until the owner is outside. From then on every thread, the owner included, must use
/// the slower exclusion that the caller has beside this one.
///
///   if (lock.enter()) { plain reads and writes; lock.leave(); }
///   else { lock.revoke(); atomic ones }
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "core/base/process/fork_guard.h"
#include "core/base/threads/host_barrier.h"

namespace muster {

namespace biased_lock_detail {
inline constinit thread_local char place = 0;
inline std::uintptr_t this_thread() noexcept { return reinterpret_cast<std::uintptr_t>(&place); }
}  // namespace biased_lock_detail

/// Thread-safe.
class BiasedLock {
 public:
  /// True: the caller is the owner and inside, until `leave`; not reentrant. False: the caller must
  /// `revoke` before it touches what the lock protects.
  bool enter() noexcept {
    if (owner_.load(std::memory_order_relaxed) != biased_lock_detail::this_thread()) [[unlikely]]
      if (!settle()) return false;
    inside_.store(1, std::memory_order_relaxed);
    meet_host_barrier();
    if (revoked_.load(std::memory_order_relaxed) == 0) [[likely]]
      return true;
    leave();
    return false;
  }
  void leave() noexcept { inside_.store(0, std::memory_order_release); }

  /// For operations that are atomic on the owner too, called from outside: every other thread
  /// revokes.
  void revoke_unless_owner() noexcept {
    if (owner_.load(std::memory_order_relaxed) != biased_lock_detail::this_thread() && !settle())
      revoke();
  }
  /// Ends the bias for good. Afterwards no thread is inside, and the owner's writes are visible.
  /// Must not be called from inside.
  void revoke() noexcept {
    if (revoked_.load(std::memory_order_acquire) == kOver) [[likely]]
      return;
    end();
  }

 private:
  static constexpr std::uint32_t kWanted = 1, kOver = 2;

  /// Whether the caller has become the owner.
  [[gnu::noinline, gnu::cold]] bool settle() noexcept {
    std::uintptr_t no_owner = 0;
    return owner_.load(std::memory_order_relaxed) == 0 &&
           revoked_.load(std::memory_order_relaxed) == 0 && takes_host_barriers() &&
           owner_.compare_exchange_strong(no_owner, biased_lock_detail::this_thread(),
                                          std::memory_order_relaxed);
  }
  [[gnu::noinline, gnu::cold]] void end() noexcept {
    std::uint32_t none = 0;
    revoked_.compare_exchange_strong(none, kWanted, std::memory_order_seq_cst);
    send_host_barrier();
    // Either the owner sees kWanted, or this sees it inside.
    while (inside_.load(std::memory_order_acquire) != 0 && !mark_.forked())
      std::this_thread::yield();
    revoked_.store(kOver, std::memory_order_release);
  }

  // Set once, from 0 to the first thread that enters. A thread only compares it with itself, so
  // relaxed order is enough.
  std::atomic<std::uintptr_t> owner_{0};
  // Written by the owner only. The release of `leave` pairs with the acquire in `end`: a thread
  // that has revoked sees all that the owner did inside.
  std::atomic<std::uint32_t> inside_{0};
  // 0, then kWanted, then kOver. kOver is stored once the owner is known to be outside; its release
  // passes that on to threads that revoke later.
  std::atomic<std::uint32_t> revoked_{0};
  ProcessMark mark_;  // a forked child does not wait: the thread inside may not exist there, and
                      // the lock excludes no thread
};

}  // namespace muster
