// SPDX-License-Identifier: BSD-3-Clause
/// Keeps a forked child from holding the job's sockets open (peers would never see this process
/// end) and from writing to memory that the parent still works with.
///
/// A child made by fork() without exec (a data loader's worker) gets copies of every descriptor.
/// Those given to a `GuardedDescriptor` are closed in it at once, and objects that remember the
/// `process_generation()` in which they were made can tell that they are in a child and refuse to
/// work. Children made by posix_spawn or vfork run no handlers; close-on-exec looks after them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/base/descriptor.h"

namespace muster {

namespace fork_guard_detail {
inline std::atomic<std::uint32_t> generation{0};
void install();
}  // namespace fork_guard_detail

/// Differs between a process and its forked children. The first call (from any object that cares)
/// arms the fork handlers. Cheap.
std::uint32_t process_generation();

/// Remembers in which process it was made.
class ProcessMark {
 public:
  ProcessMark() : generation_(process_generation()) {}
  /// True in a child forked from the process that made this. One relaxed load.
  bool forked() const {
    return fork_guard_detail::generation.load(std::memory_order_relaxed) != generation_;
  }

 private:
  std::uint32_t generation_;
};

/// One `T` of each process, made on first use and never destroyed. A forked child makes its own:
/// another thread may have been changing its parent's, or held a lock in it. Use as a static
/// variable. Thread-safe.
template <class T>
class PerProcess {
 public:
  constexpr PerProcess() = default;
  T& get() {
    Made* known = made_.load(std::memory_order_acquire);
    if (known != nullptr && !known->mark.forked()) return known->value;
    auto fresh = std::make_unique<Made>();
    fresh->of_parent = known;
    if (made_.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel,
                                      std::memory_order_acquire))
      return fresh.release()->value;
    return known->value;  // another thread's
  }

 private:
  struct Made {
    const ProcessMark mark{};
    T value{};
    Made* of_parent = nullptr;  // stays reachable for leak checkers
  };
  // Only grows: a child's is put before its parent's, and none is ever freed. Published by a
  // release that pairs with the acquire in `get`.
  std::atomic<Made*> made_{nullptr};
};

/// Owns a descriptor that forked children lose. Movable, not copyable. In a child it has no
/// effect: closing it does nothing, because the number may have been reused.
class GuardedDescriptor {
 public:
  GuardedDescriptor() = default;
  explicit GuardedDescriptor(Descriptor descriptor);
  GuardedDescriptor(GuardedDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), mark_(other.mark_) {}
  GuardedDescriptor& operator=(GuardedDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      mark_ = other.mark_;
    }
    return *this;
  }
  ~GuardedDescriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
  ProcessMark mark_;
};

}  // namespace muster
