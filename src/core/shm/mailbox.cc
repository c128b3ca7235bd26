// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/mailbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "core/base/threads/host_barrier.h"
#include "core/wait/spin_wait.h"

namespace muster::shm {
namespace {

// Longer than any sleep, and within the range that every kernel accepts.
constexpr Duration kLongestSleep = std::chrono::hours(1);  // limit: of futex

// Not FUTEX_PRIVATE: several processes may map the word.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, Duration limit) {
  const auto nanoseconds = std::clamp(limit, Duration::zero(), kLongestSleep).count();
  timespec relative{};
  relative.tv_sec = nanoseconds / 1'000'000'000;
  relative.tv_nsec = nanoseconds % 1'000'000'000;
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &relative,
          nullptr, 0);
}

// ThreadSanitizer does not support fences. A read-modify-write has the same ordering effect here.
#if defined(__SANITIZE_THREAD__)
void full_fence(std::atomic<std::uint32_t>& word) { word.fetch_add(0, std::memory_order_seq_cst); }
#else
void full_fence(std::atomic<std::uint32_t>&) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
#endif

}  // namespace

static_assert(sizeof(Mailbox) == 64 && std::atomic<std::uint32_t>::is_always_lock_free &&
                  std::atomic<std::uint64_t>::is_always_lock_free,
              "a mailbox is one cache line that processes share");

// The waker publishes, fences, then checks for sleepers. The sleeper announces itself, fences, then
// polls. At least one of the two sees the other.
void Mailbox::wake() {
  full_fence(sleepers);
  if (sleepers.load(std::memory_order_relaxed) == 0) return;
  // Invalidates the ticket of a sleeper between its announcement and its sleep.
  word.fetch_add(1, std::memory_order_acq_rel);
  if (syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
              nullptr, 0) > 0)
    note_wakeup();
}

std::uint32_t Mailbox::prepare_sleep() {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  full_fence(sleepers);
  if (sends_barriers.load(std::memory_order_relaxed) != 0) send_host_barrier();
  return word.load(std::memory_order_acquire);
}

void Mailbox::sleep(std::uint32_t ticket, Duration limit) {
  futex_wait(word, ticket, limit);
  sleepers.fetch_sub(1, std::memory_order_release);
}

void Mailbox::cancel_sleep() { sleepers.fetch_sub(1, std::memory_order_release); }

}  // namespace muster::shm
