// SPDX-License-Identifier: BSD-3-Clause
/// Processes of tests that stop and die.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "core/base/descriptor.h"

namespace muster::membership::testing {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kForksStartNoThreads = true;
#else
inline constexpr bool kForksStartNoThreads = false;
#endif

/// A process that does something with the job and then sits there until it is killed. Best forked
/// before this one has threads: AddressSanitizer's allocator may be locked by one of them then, and
/// the child waits for it.
class Bystander {
 public:
  explicit Bystander(const std::function<bool()>& body) {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    child_ = ::fork();
    if (child_ == 0) {
      ::close(ends[0]);
      const char done = body() ? 'y' : 'n';
      [[maybe_unused]] const ssize_t written = ::write(ends[1], &done, 1);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    end_.reset(ends[0]);
  }
  ~Bystander() { kill(); }
  Bystander(const Bystander&) = delete;
  Bystander& operator=(const Bystander&) = delete;

  /// Waits until the child has done it.
  bool ready() {
    char done = 'n';
    return ::read(end_.get(), &done, 1) == 1 && done == 'y';
  }
  void stop() { ::kill(child_, SIGSTOP); }
  /// Waits until it stands still. False: it has ended.
  bool stands_still() const {
    int status = 0;
    return ::waitpid(child_, &status, WUNTRACED) == child_ && WIFSTOPPED(status);
  }
  void go_on() { ::kill(child_, SIGCONT); }
  void kill() {
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    child_ = -1;
  }

 private:
  pid_t child_ = -1;
  Descriptor end_;
};

}  // namespace muster::membership::testing
