// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/threads/thread_start.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace muster {
namespace {

std::atomic<int> refusals{0};

/// The mask of the thread that started this one; nothing on threads of the program's.
thread_local std::optional<sigset_t> program_mask;

/// pthread_sigmask fails only on an unknown `how`, so its result says nothing.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    // Blocked, these would end the process without the handlers that report the fault.
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  /// The mask to give to user code: on a thread of the engine, that of the program's thread.
  const sigset_t& programs() const { return program_mask ? *program_mask : before_; }

 private:
  sigset_t before_;
};

std::thread start(std::function<void()> body) {
  if (refusals.load(std::memory_order_relaxed) > 0)
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  const BlockedSignals blocked;
  return std::thread([body = std::move(body), mask = blocked.programs()] {
    program_mask = mask;
    body();
  });
}

}  // namespace

Result<std::thread> start_thread(std::string_view what, std::function<void()> body) try {
  return start(std::move(body));
} catch (const std::exception& error) {
  return Status(Code::exhausted, "cannot start " + std::string(what) + ": " + error.what() +
                                     "; look at the limits of processes and of address space "
                                     "(ulimit -u, ulimit -v, pids.max of the "
                                     "control group)");
}

ProgramSignals::ProgramSignals() : changed_(program_mask.has_value()) {
  if (changed_) pthread_sigmask(SIG_SETMASK, &*program_mask, &before_);
}
ProgramSignals::~ProgramSignals() {
  if (changed_) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

NoNewThreads::NoNewThreads() { refusals.fetch_add(1); }
NoNewThreads::~NoNewThreads() { refusals.fetch_sub(1); }

Status spawn_threads(int n, const std::function<Status(int rank)>& body, const ThreadHooks& hooks) {
  if (n < 1)
    return Status(Code::invalid_argument,
                  "cannot spawn " + std::to_string(n) + " threads: at least 1 is needed");
  std::mutex
      mutex;  // guards `first`; held during on_first_failure, so no later failure overtakes it
  Status first;
  const auto note = [&](int rank, Status failure) {
    const std::lock_guard lock(mutex);
    if (!first) return;
    first = std::move(failure);
    if (hooks.on_first_failure) hooks.on_first_failure(rank, first);
  };
  const auto run = [&](int rank) {
    const Status said = [&] {
      const ProgramSignals programs;  // it is the user's code
      return body(rank);
    }();
    if (!said)
      note(rank, Status(said.code(),
                        "rank " + std::to_string(rank) + " (a thread) failed: " + said.message(),
                        said.ranks().empty() ? std::vector{rank} : said.ranks()));
    if (hooks.at_end) hooks.at_end(rank);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(n));
  for (int rank = 0; rank < n; ++rank) {
    auto thread =
        start_thread("the thread of rank " + std::to_string(rank), [&, rank] { run(rank); });
    if (!thread) {
      note(rank, Status(thread.status().code(), thread.status().message(), {rank}));
      break;
    }
    threads.push_back(std::move(*thread));
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace muster
