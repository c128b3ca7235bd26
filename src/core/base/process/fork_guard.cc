// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace muster {
namespace {

/// Guarded descriptors of this process. Leaked on purpose: handlers may run while statics are being
/// destroyed.
struct ForkRegistry {
  std::mutex lock;
  std::vector<bool> guarded;  // by descriptor number
};
ForkRegistry& registry() {
  static ForkRegistry* const one = new ForkRegistry;
  return *one;
}

// The lock is held across the fork, so that the child sees no half-made change and no descriptor
// between its unmarking and its closing.
void before_fork() { registry().lock.lock(); }
void after_fork_in_parent() { registry().lock.unlock(); }
void after_fork_in_child() {
  fork_guard_detail::generation.fetch_add(1, std::memory_order_relaxed);
  auto& guarded = registry().guarded;
  for (std::size_t fd = 0; fd < guarded.size(); ++fd) {
    if (guarded[fd]) ::close(static_cast<int>(fd));
    guarded[fd] = false;
  }
  registry().lock.unlock();
}

}  // namespace

void fork_guard_detail::install() {
  static const int installed =
      pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(installed);
}

std::uint32_t process_generation() {
  fork_guard_detail::install();
  return fork_guard_detail::generation.load(std::memory_order_relaxed);
}

GuardedDescriptor::GuardedDescriptor(Descriptor descriptor) : fd_(descriptor.release()) {
  if (fd_ < 0) return;
  ForkRegistry& all = registry();
  const std::lock_guard hold(all.lock);
  if (all.guarded.size() <= static_cast<std::size_t>(fd_))
    all.guarded.resize(static_cast<std::size_t>(fd_) + 64);
  all.guarded[static_cast<std::size_t>(fd_)] = true;
}

void GuardedDescriptor::reset() {
  if (fd_ < 0) return;
  if (!mark_.forked()) {
    ForkRegistry& all = registry();
    const std::lock_guard hold(all.lock);
    all.guarded[static_cast<std::size_t>(fd_)] = false;
    ::close(fd_);
  }
  fd_ = -1;
}

}  // namespace muster
