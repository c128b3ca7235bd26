// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/bench/timed_library.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/security/secret.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/process.h"
#include "jobs/launch/workers/worker_commands.h"
#include "muster/clock.h"

namespace muster::cli::bench {
namespace {

constexpr Duration kEndLimit = std::chrono::seconds(10);

/// A named pipe, open at both ends here, so that neither side waits for the other to open it.
Result<Descriptor> make_pipe(const std::string& path) {
  if (::mkfifo(path.c_str(), 0600) != 0)
    return Status(Code::exhausted, "cannot make the pipe " + path + ": " + errno_text(errno));
  Descriptor both(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!both)
    return Status(Code::exhausted, "cannot open the pipe " + path + ": " + errno_text(errno));
  return both;
}

bool wait_for(int descriptor, Duration limit) {
  pollfd waiting{descriptor, POLLIN, 0};
  const TimePoint now = steady_clock().now();
  return ::poll(&waiting, 1, poll_milliseconds(now, now + limit)) == 1;
}

/// False, with the reason once on standard error, if calls on tensors are asked for and this build
/// has none.
bool times_tensors(const RankOptions& options, const std::string& worker) {
  std::error_code error;
  if (!options.tensors || std::filesystem::exists(worker, error)) return options.tensors;
  static bool said = false;
  if (!std::exchange(said, true))
    std::fprintf(stderr,
                 "muster bench: times the engine alone, below the tensors: %s is not there; it is "
                 "built with the half of muster that needs torch\n",
                 worker.c_str());
  return false;
}

}  // namespace

std::string program_beside(const std::string& name) {
  return (std::filesystem::path(launch::own_program()).parent_path() / name).string();
}

StartPlan plan_muster(const RankOptions& options, const std::string& folder) {
  const std::string worker = program_beside("muster_bench_worker");
  StartPlan plan{"muster", {worker}, {}};
  plan.engine = !times_tensors(options, worker);
  if (plan.engine) plan.command = {launch::own_program(), "bench-worker"};
  plan.command.insert(plan.command.end(), {"--ranks", std::to_string(options.ranks), "--folder",
                                           folder, "--transport", options.transport});
  if (options.threads) plan.command.emplace_back("--threads");
  plan.environment = {{"MUSTER_SECRET", Secret::random_text()}};
  return plan;
}

Result<std::unique_ptr<TimedLibrary>> TimedLibrary::start(const StartPlan& plan, int ranks,
                                                          const std::string& folder) {
  std::unique_ptr<TimedLibrary> made(new TimedLibrary);
  made->library_ = plan.library;
  made->folder_ = folder;
  auto back = make_pipe(folder + "/back");
  if (!back) return back.status();
  made->back_ = std::move(*back);
  for (int rank = 0; rank < ranks; ++rank) {
    auto order = make_pipe(folder + "/to-" + std::to_string(rank));
    if (!order) return order.status();
    made->orders_.push_back(std::move(*order));
  }
  const Descriptor log(
      ::open((folder + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  auto file = launch::find_program(plan.command.front());
  if (!file) return file.status();
  launch::WorkerCommand command;
  command.file = *file;
  command.arguments = plan.command;
  launch::Environment environment = launch::inherited_environment();
  for (const auto& [name, value] : plan.environment) environment[name] = value;
  command.environment = launch::flatten(environment);
  command.out = command.err = log.get();
  command.quiet_input = true;
  sigset_t none;
  ::sigemptyset(&none);
  int exit_code = 0;
  auto started = launch::start_worker(command, none, &exit_code);
  if (!started) return started.status();
  made->pid_ = started->pid;
  made->pidfd_ = std::move(started->pidfd);
  return made;
}

TimedLibrary::~TimedLibrary() {
  if (pid_ <= 0) return;
  for (const Descriptor& order : orders_) {
    [[maybe_unused]] const ssize_t written = ::write(order.get(), "quit\n", 5);
  }
  if (failed_ || !wait_for(pidfd_.get(), kEndLimit)) ::killpg(pid_, SIGTERM);
  if (!wait_for(pidfd_.get(), kEndLimit)) ::killpg(pid_, SIGKILL);
  wait_for(pidfd_.get(), kEndLimit);
  ::killpg(pid_, SIGKILL);  // what its launcher left behind
  static_cast<void>(launch::reap(pid_));
}

std::string TimedLibrary::end_of_log() const {
  std::ifstream log(folder_ + "/log");
  std::ostringstream all;
  all << log.rdbuf();
  std::string text = all.str();
  constexpr std::size_t kTail = 1500;
  if (text.size() > kTail) text = "..." + text.substr(text.size() - kTail);
  return text.empty() ? "it said nothing" : "it said:\n" + text;
}

CellResult TimedLibrary::measure(const Cell& cell) {
  if (failed_) return {{}, "its ranks have ended", false};
  const std::string line = encode(cell);
  for (const Descriptor& order : orders_) {
    if (::write(order.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      failed_ = true;
  }
  // The first cell waits for the ranks to start too.
  const TimePoint deadline =
      deadline_after(steady_clock(), std::chrono::seconds(90) +
                                         std::chrono::seconds(static_cast<int>(60 * cell.seconds)));
  while (!failed_) {
    if (const std::size_t end = unread_.find('\n'); end != std::string::npos) {
      const std::string answer = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      CellResult decoded = decode_answer(answer);
      if (!decoded.figures && !decoded.skipped) failed_ = true;
      return decoded;
    }
    pollfd waiting[2] = {{back_.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}};
    const TimePoint now = steady_clock().now();
    if (now >= deadline) {
      failed_ = true;
      return {{}, library_ + " did not answer in time; " + end_of_log(), false};
    }
    if (::poll(waiting, 2, poll_milliseconds(now, deadline)) < 0 && errno != EINTR) break;
    if (waiting[0].revents != 0) {
      char bytes[4096];
      const ssize_t n = ::read(back_.get(), bytes, sizeof bytes);
      if (n > 0) unread_.append(bytes, static_cast<std::size_t>(n));
    } else if (waiting[1].revents != 0) {
      failed_ = true;
      return {{}, "the ranks of " + library_ + " have ended; " + end_of_log(), false};
    }
  }
  failed_ = true;
  return {{}, "the ranks of " + library_ + " cannot be reached", false};
}

}  // namespace muster::cli::bench
