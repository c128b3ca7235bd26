// SPDX-License-Identifier: BSD-3-Clause
/// An owning file descriptor, and what the system calls take that make and use them.
#pragma once

#include <cerrno>
#include <string>
#include <utility>

#include "muster/clock.h"

namespace muster {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

/// The time until `until` as poll and epoll_wait take it: milliseconds, rounded up, so that they do
/// not end before it; -1 for TimePoint::max(). They end sooner where `until` is 24 days away.
int poll_milliseconds(TimePoint now, TimePoint until);

/// Whether a system call failed for the want of a descriptor, or of the kernel's memory for one: it
/// may do later.
inline bool lacks_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM ||
         error == ENOSPC;
}

/// Text of an errno value, thread-safe: "connection refused (ECONNREFUSED)".
std::string errno_text(int error);

}  // namespace muster
