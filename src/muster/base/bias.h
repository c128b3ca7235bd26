/// Exclusion where one thread goes in and out all the time and others hardly ever want to.
///
/// The first thread that comes is favoured: it goes in by two stores and a look, without an atomic
/// exchange, each of which would take as long as dozens of other instructions. When another thread
/// wants something, it revokes that: it sends a barrier (`host_barrier.h`), waits until the
/// favoured one is outside, and from then on, for good, all threads go by whatever exclusion there
/// is beside this one.
///
///   if (bias.enter()) { plain reads and writes; bias.leave(); }
///   else { bias.revoke(); atomic ones }
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "muster/base/fork_guard.h"
#include "muster/base/host_barrier.h"

namespace muster {

namespace bias_detail {
inline constinit thread_local char place = 0;
inline std::uintptr_t this_thread() noexcept { return reinterpret_cast<std::uintptr_t>(&place); }
}  // namespace bias_detail

/// Thread-safe.
class Bias {
 public:
  /// True: the caller is favoured and inside, until `leave`. Not to be entered twice. False: it
  /// must `revoke` before it does what those do who are inside.
  bool enter() noexcept {
    if (favoured_.load(std::memory_order_relaxed) != bias_detail::this_thread()) [[unlikely]]
      if (!settle()) return false;
    inside_.store(1, std::memory_order_relaxed);
    meet_host_barrier();
    if (revoked_.load(std::memory_order_relaxed) == 0) [[likely]]
      return true;
    leave();
    return false;
  }
  void leave() noexcept { inside_.store(0, std::memory_order_release); }

  /// For what goes by atomic exchanges also where the favoured thread does it, from outside:
  /// anybody else revokes.
  void stand_back() noexcept {
    if (favoured_.load(std::memory_order_relaxed) != bias_detail::this_thread() && !settle())
      revoke();
  }
  /// Ends it: once this has returned nobody is inside, and what was done there is seen. Not to be
  /// called from inside.
  void revoke() noexcept {
    if (revoked_.load(std::memory_order_acquire) == kOver) [[likely]]
      return;
    end();
  }

 private:
  static constexpr std::uint32_t kWanted = 1, kOver = 2;

  /// Whether the caller is favoured from now on.
  [[gnu::noinline, gnu::cold]] bool settle() noexcept {
    std::uintptr_t nobody = 0;
    return favoured_.load(std::memory_order_relaxed) == 0 &&
           revoked_.load(std::memory_order_relaxed) == 0 && takes_host_barriers() &&
           favoured_.compare_exchange_strong(nobody, bias_detail::this_thread(),
                                             std::memory_order_relaxed);
  }
  [[gnu::noinline, gnu::cold]] void end() noexcept {
    std::uint32_t none = 0;
    revoked_.compare_exchange_strong(none, kWanted, std::memory_order_seq_cst);
    send_host_barrier();
    // The favoured thread sees that it is wanted, or is seen inside here.
    while (inside_.load(std::memory_order_acquire) != 0 && !mark_.forked())
      std::this_thread::yield();
    revoked_.store(kOver, std::memory_order_release);
  }

  std::atomic<std::uintptr_t> favoured_{0};
  std::atomic<std::uint32_t> inside_{0};
  std::atomic<std::uint32_t> revoked_{0};
  ProcessMark mark_;  // in a forked child, where who was inside may be gone, nobody is waited for:
                      // there it excludes nobody
};

}  // namespace muster
