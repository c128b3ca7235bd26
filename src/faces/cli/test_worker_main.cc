// SPDX-License-Identifier: BSD-3-Clause
/// A worker for the launcher's tests; the first argument says what it does.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/rendezvous/rendezvous.h"
#include "core/trace/recorder.h"
#include "jobs/launch/workers/process.h"
#include "testing/limits.h"

#if defined(__SANITIZE_ADDRESS__)
// A process that looks for leaks at its end spins until it has a core. The launchers look for
// theirs; dozens of their workers, at once, would take the tests' time.
extern "C" int __lsan_is_turned_off() { return 1; }
#endif

namespace {

// Says that it is ready, waits for a stop signal, says which came, and exits with `code`.
int wait_for_signal(int code) {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&set, signal);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  std::printf("ready\n");
  std::fflush(stdout);
  int got = 0;
  ::sigwait(&set, &got);
  std::printf("got %s\n", muster::launch::signal_name(got).c_str());
  std::fflush(stdout);
  return code;
}

int ignore_signals() {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_IGN);
  std::printf("ready\n");
  std::fflush(stdout);
  for (;;) ::pause();
}

// `lines` numbered lines of 100 bytes.
int flood(long lines) {
  for (long i = 0; i < lines; ++i) std::printf("%09ld %089d\n", i, 0);
  return 0;
}

// All ranks meet at the store that their environment names, as programs do.
int meet() {
  muster::store::RendezvousOptions options;
  options.timeout = muster::testing::kMustHappen;
  auto met = muster::store::rendezvous(options);
  if (!met) {
    std::cerr << met.status().message() << "\n";
    return 1;
  }
  auto all =
      met->store->all_gather("meeting", met->rank, met->world_size, std::to_string(met->rank));
  if (!all) {
    std::cerr << all.status().message() << "\n";
    return 1;
  }
  std::string text;
  for (const std::string& value : *all) text += value;
  std::cout << "met " << text << "\n";
  return 0;
}

// Is a rank that has called something, and fails; or that is a child of the worker.
int leave_a_trace(bool as_child) {
  if (as_child) {
    const pid_t child = ::fork();
    int state = 0;
    if (child > 0) return ::waitpid(child, &state, 0) == child ? WEXITSTATUS(state) : 1;
  }
  const auto rank = muster::env_integer("RANK", 0, 1000),
             size = muster::env_integer("WORLD_SIZE", 1, 1000);
  const auto recorder = muster::trace::Recorder::from_environment(
      "job-of-a-worker", static_cast<int>(**rank), static_cast<int>(**size));
  if (!recorder) return 1;
  const std::vector<int> world = {0};
  const auto group = (*recorder)->add_group("default", world, 0);
  (*recorder)->begin(group, {.name = "barrier", .sequence = 1}, muster::steady_clock().now());
  return 3;
}

// Logs a line, as a rank.
int log_a_line() {
  muster::set_log_rank(static_cast<int>(**muster::env_integer("RANK", 0, 1000)));
  muster::log(muster::LogLevel::error, "said");
  return 0;
}

// Makes so many calls of 8 bytes, enters one more, and waits for a signal.
int make_calls(long calls) {
  const auto rank = muster::env_integer("RANK", 0, 1000),
             size = muster::env_integer("WORLD_SIZE", 1, 1000);
  const auto recorder = muster::trace::Recorder::from_environment(
      "job-of-calls", static_cast<int>(**rank), static_cast<int>(**size));
  if (!recorder || !*recorder) return 1;
  std::vector<int> world(static_cast<std::size_t>(**size));
  std::iota(world.begin(), world.end(), 0);
  const auto group = (*recorder)->add_group("default", world, static_cast<int>(**rank));
  for (std::uint64_t sequence = 1; sequence <= static_cast<std::uint64_t>(calls) + 1; ++sequence) {
    const auto ticket =
        (*recorder)->begin(group, {.name = "all_reduce", .sequence = sequence, .bytes = 8},
                           muster::steady_clock().now());
    if (sequence <= static_cast<std::uint64_t>(calls))
      (*recorder)->end(ticket, muster::steady_clock().now());
  }
  return wait_for_signal(0);
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  const long number = count > 2 ? std::atol(words[2]) : 0;
  if (what == "wait") return wait_for_signal(static_cast<int>(number));
  if (what == "ignore") return ignore_signals();
  if (what == "flood") return flood(number);
  if (what == "meet") return meet();
  if (what == "log") return log_a_line();
  if (what == "calls") return make_calls(number);
  if (what == "trace" || what == "trace-of-child") return leave_a_trace(what != "trace");
  std::cerr << "unknown: " << what << "\n";
  return 64;
}
