#include "muster/base/thread_start.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace muster {
namespace {

std::atomic<int> refusals{0};

class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

std::thread start(std::function<void()> body, Signals signals) {
  if (refusals.load(std::memory_order_relaxed) > 0)
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  if (signals == Signals::inherited) return std::thread(std::move(body));
  const BlockedSignals blocked;
  return std::thread(std::move(body));
}

}  // namespace

Result<std::thread> start_thread(std::string_view what, std::function<void()> body,
                                 Signals signals) try {
  return start(std::move(body), signals);
} catch (const std::exception& error) {
  return Status(Code::exhausted, "cannot start " + std::string(what) + ": " + error.what() +
                                     "; look at the limits of processes and of address space "
                                     "(ulimit -u, ulimit -v, pids.max of the "
                                     "control group)");
}

NoNewThreads::NoNewThreads() { refusals.fetch_add(1); }
NoNewThreads::~NoNewThreads() { refusals.fetch_sub(1); }

}  // namespace muster
