// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/spawn.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <optional>
#include <thread>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "core/base/process/limits.h"
#include "core/base/threads/thread_start.h"
#include "core/net/socket_address.h"
#include "jobs/launch/workers/process.h"

namespace muster::launch {
namespace {

constexpr std::size_t kMaxReportBytes = std::size_t{1} << 20;  // limit: memory
constexpr int kFailedBody = 1;
constexpr Duration kLastWords = std::chrono::seconds(2);

// The report that a child writes to its memory file when its body fails. A file and not a pipe, so
// that a child never blocks on a parent that does not read.
struct ChildReport {
  TimePoint at;
  Status status;
};

void write_report(int fd, const Status& status) {
  ByteWriter writer;
  writer.put(steady_clock().now().time_since_epoch().count());
  writer.put(status.code());
  writer.put(static_cast<std::uint32_t>(status.ranks().size()));
  for (int rank : status.ranks()) writer.put(rank);
  writer.put_text(std::string_view(status.message()).substr(0, kMaxReportBytes / 2));
  const std::string record = writer.take();
  const FileSizeSignalBlock block;
  for (std::size_t at = 0; at < record.size();) {
    const ssize_t wrote = ::write(fd, record.data() + at, record.size() - at);
    if (wrote < 0 && errno != EINTR) return;
    if (wrote > 0) at += static_cast<std::size_t>(wrote);
  }
}

std::optional<ChildReport> read_report(int fd) {
  struct stat file {};
  if (::fstat(fd, &file) != 0 || file.st_size <= 0 ||
      static_cast<std::size_t>(file.st_size) > kMaxReportBytes)
    return {};
  std::string record(static_cast<std::size_t>(file.st_size), '\0');
  if (::pread(fd, record.data(), record.size(), 0) != file.st_size) return {};
  ByteReader reader(record);
  const auto at = TimePoint(Duration(reader.get<Duration::rep>()));
  const auto code = reader.get<Code>();
  const auto count = reader.get<std::uint32_t>();
  if (!reader.ok() || code == Code::ok || code > Code::internal ||
      count > reader.left() / sizeof(int))
    return {};
  std::vector<int> ranks(count);
  for (int& rank : ranks) rank = reader.get<int>();
  std::string text(reader.get_text());
  if (!reader.at_end()) return {};
  return ChildReport{at, Status(code, std::move(text), std::move(ranks))};
}

[[noreturn]] void run_child(int rank, const SpawnBody& body, pid_t parent, int report) {
  die_with_parent(parent, SIGKILL);
  const Status status = body(rank);
  if (!status) write_report(report, status);
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  // Exit handlers and static objects belong to the parent, and their threads were not copied.
  ::_exit(status ? 0 : kFailedBody);
}

}  // namespace

struct SpawnedProcesses::Children {
  struct Child {
    Descriptor pidfd;  // invalid once reaped
    Descriptor report;
  };
  struct Death {
    int rank;
    ProcessExit exit;
    std::optional<ChildReport> report;
    /// The rank that this one's error blames.
    std::optional<int> blames() const {
      if (!report || report->status.code() == Code::timed_out || report->status.ranks().size() != 1)
        return {};
      const int other = report->status.ranks().front();
      return other == rank ? std::nullopt : std::optional(other);
    }
  };

  ProcessOptions options;
  std::vector<pid_t> pids;
  std::vector<Child> children;
  Status failure;

  bool running() const {
    return std::any_of(children.begin(), children.end(),
                       [](const Child& child) { return static_cast<bool>(child.pidfd); });
  }
  void kill(int signal) {
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      if (children[rank].pidfd) ::kill(pids[rank], signal);
    }
  }
  // Sleeps until a child ends or the deadline passes. Reaps all that have ended.
  Result<std::vector<Death>> wait_for_deaths(TimePoint deadline);
  bool runs(int rank) const {
    return rank >= 0 && static_cast<std::size_t>(rank) < children.size() &&
           children[static_cast<std::size_t>(rank)].pidfd;
  }
  static const Death& cause_among(const std::vector<Death>& deaths);
  Status describe_failure(const Death& death) const;
  Status find_cause(std::vector<Death> failed);
  Status end_all();
};

Result<std::vector<SpawnedProcesses::Children::Death>> SpawnedProcesses::Children::wait_for_deaths(
    TimePoint deadline) {
  std::vector<pollfd> watched;
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    if (!children[rank].pidfd) continue;
    watched.push_back({children[rank].pidfd.get(), POLLIN, 0});
    ranks.push_back(rank);
  }
  int ready = 0;
  do {
    ready =
        ::poll(watched.data(), watched.size(), poll_milliseconds(steady_clock().now(), deadline));
  } while (ready < 0 && errno == EINTR);
  if (ready < 0)
    return Status(Code::exhausted,
                  "waiting for the spawned processes failed: " + errno_text(errno));
  std::vector<Death> deaths;
  for (std::size_t i = 0; i < watched.size(); ++i) {
    if (watched[i].revents == 0) continue;
    const std::size_t rank = ranks[i];
    auto exit = reap(pids[rank]);
    children[rank].pidfd.reset();
    if (!exit) return exit.status().with_context("rank " + std::to_string(rank));
    deaths.push_back({static_cast<int>(rank), exit->value_or(ProcessExit{}),
                      read_report(children[rank].report.get())});
  }
  return deaths;
}

// A rank without a report (ended by a signal or an exit) is the likelier cause; otherwise the
// earliest report. If that report blames another failed rank, follow the blame: a failing rank
// leaves its groups before it writes its report, so the others may report first.
const SpawnedProcesses::Children::Death& SpawnedProcesses::Children::cause_among(
    const std::vector<Death>& deaths) {
  const auto when = [](const Death& death) {
    return death.report ? death.report->at : TimePoint::min();
  };
  const Death* cause =
      &*std::min_element(deaths.begin(), deaths.end(),
                         [&](const Death& a, const Death& b) { return when(a) < when(b); });
  for (std::size_t steps = 0; steps < deaths.size(); ++steps) {
    const std::optional<int> blamed = cause->blames();
    const auto found = std::find_if(deaths.begin(), deaths.end(),
                                    [&](const Death& death) { return blamed == death.rank; });
    if (found == deaths.end()) break;
    cause = &*found;
  }
  return *cause;
}

Status SpawnedProcesses::Children::describe_failure(const Death& death) const {
  const std::string who = "rank " + std::to_string(death.rank) + " (process " +
                          std::to_string(pids[static_cast<std::size_t>(death.rank)]) + ")";
  if (!death.report) {
    const std::string verb = death.exit.signal != 0 ? " was ended by " : " ended with ";
    return Status(Code::peer_failed, who + verb + describe(death.exit) + " and left no message",
                  {death.rank});
  }
  const Status& said = death.report->status;
  return Status(said.code(), who + " failed: " + said.message(),
                said.ranks().empty() ? std::vector{death.rank} : said.ranks());
}

// If the first failure blames a rank that still runs, that rank gets `kLastWords` to report before
// all are ended.
Status SpawnedProcesses::Children::find_cause(std::vector<Death> failed) {
  const TimePoint limit = deadline_after(steady_clock(), kLastWords);
  for (;;) {
    const Death& cause = cause_among(failed);
    const std::optional<int> blamed = cause.blames();
    if (!blamed || !runs(*blamed) || steady_clock().now() >= limit) return describe_failure(cause);
    auto more = wait_for_deaths(limit);
    if (!more) return more.status();
    for (Death& death : *more) {
      if (!death.exit.success()) failed.push_back(std::move(death));
    }
  }
}

Status SpawnedProcesses::Children::end_all() {
  kill(SIGTERM);
  EndingGrace grace(steady_clock(), options.shutdown_timeout);
  bool killed = false;
  while (running()) {
    auto deaths = wait_for_deaths(killed ? TimePoint::max() : grace.deadline());
    if (!deaths) return deaths.status();
    if (killed || !grace.is_over()) continue;
    kill(SIGKILL);
    killed = true;
  }
  return {};
}

SpawnedProcesses::SpawnedProcesses(std::unique_ptr<Children> children)
    : children_(std::move(children)) {}
SpawnedProcesses::SpawnedProcesses(SpawnedProcesses&&) noexcept = default;

SpawnedProcesses& SpawnedProcesses::operator=(SpawnedProcesses&& other) noexcept {
  std::swap(children_, other.children_);
  return *this;
}

SpawnedProcesses::~SpawnedProcesses() {
  if (!children_) return;
  children_->kill(SIGKILL);
  while (children_->running()) {
    if (!children_->wait_for_deaths(TimePoint::max())) return;
  }
}

Result<bool> SpawnedProcesses::join(Duration timeout) {
  const TimePoint deadline = deadline_after(steady_clock(), timeout);
  while (children_->failure && children_->running()) {
    auto deaths = children_->wait_for_deaths(deadline);
    if (!deaths) return deaths.status();
    if (deaths->empty() && steady_clock().now() >= deadline) return false;
    std::erase_if(*deaths, [](const Children::Death& death) { return death.exit.success(); });
    if (deaths->empty()) continue;
    children_->failure = children_->find_cause(std::move(*deaths));
    if (Status ended = children_->end_all(); !ended) return ended;
  }
  if (!children_->failure) return children_->failure;
  return true;
}

const std::vector<pid_t>& SpawnedProcesses::pids() const { return children_->pids; }
void SpawnedProcesses::kill(int signal) { children_->kill(signal); }

Result<SpawnedProcesses> start_processes(int n, const SpawnBody& body,
                                         const ProcessOptions& options) {
  if (n < 1)
    return Status(Code::invalid_argument,
                  "cannot spawn " + std::to_string(n) + " processes: at least 1 is needed");
  SpawnedProcesses spawned(std::make_unique<SpawnedProcesses::Children>());
  auto& all = *spawned.children_;
  all.options = options;
  // Every child would write out the parent's buffered output again.
  std::cout.flush();
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  for (int rank = 0; rank < n; ++rank) {
    const std::string who =
        "starting the process of rank " + std::to_string(rank) + " of " + std::to_string(n);
    Descriptor report(::memfd_create("muster-spawn-report", MFD_CLOEXEC));
    if (!report) return Status(Code::exhausted, who + ": no memory file: " + errno_text(errno));
    const pid_t pid = ::fork();
    if (pid < 0)
      return Status(Code::exhausted, who + ": fork: " + errno_text(errno) +
                                         "; see `ulimit -u` and the memory limit");
    if (pid == 0) run_child(rank, body, parent, report.get());
    auto pidfd = open_pidfd(pid);
    if (!pidfd) {
      ::kill(pid, SIGKILL);
      while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
      return pidfd.status().with_context(who);
    }
    all.pids.push_back(pid);
    all.children.push_back({std::move(*pidfd), std::move(report)});
  }
  return spawned;
}

Status spawn_processes(int n, const SpawnBody& body, const ProcessOptions& options) {
  auto spawned = start_processes(n, body, options);
  if (!spawned) return spawned.status();
  return spawned->join().status();
}

}  // namespace muster::launch
