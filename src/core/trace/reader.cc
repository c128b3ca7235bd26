// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <span>

#include "core/base/descriptor.h"
#include "core/base/dtype.h"
#include "core/base/process/process_start.h"
#include "core/security/own_files.h"
#include "core/trace/run_directory.h"
#include "muster/clock.h"

namespace muster::trace {
namespace {

constexpr int kAttempts = 100;

template <std::size_t Size>
std::string text_of(const char (&field)[Size]) {
  return std::string(field, ::strnlen(field, Size));
}

/// A trace file, read piece by piece. With a mapping, truncation of the file would kill this
/// process (SIGBUS), and the header could change after it was checked.
class TraceFile {
 public:
  explicit TraceFile(int file) : file_(file) {}

  /// Copies the bytes at `offset`, ordered after earlier copies; empty if the file ends before
  /// them.
  template <class T>
  void read(std::size_t offset, std::span<T> out) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const auto bytes = std::as_writable_bytes(out);
    std::size_t have = 0;
    while (have < bytes.size()) {
      const ssize_t n = ::pread(file_, bytes.data() + have, bytes.size() - have,
                                static_cast<off_t>(offset + have));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      have += static_cast<std::size_t>(n);
    }
    if (have < bytes.size()) {
      std::memset(bytes.data() + have, 0, bytes.size() - have);
      cut_short_ = true;
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  bool cut_short() const { return cut_short_; }

 private:
  const int file_;
  bool cut_short_ = false;
};

/// Three successive copies of the same data. If a stamp is even and equal in the first and the
/// last, its owner wrote nothing while the middle one was copied.
template <class T>
struct ThreeCopies {
  explicit ThreeCopies(std::size_t count) : before(count), middle(count), after(count) {}
  void read(TraceFile& file, std::size_t offset, std::size_t count) {
    file.read(offset, std::span(before).first(count));
    file.read(offset, std::span(middle).first(count));
    file.read(offset, std::span(after).first(count));
  }
  std::vector<T> before, middle, after;
};

bool is_whole(const FileHeader& header, std::size_t bytes) {
  if (header.magic != kMagic || header.version != kVersion || header.header_bytes != kHeaderBytes ||
      header.group_bytes != sizeof(GroupSlot) || header.groups != kGroups ||
      header.entry_bytes != sizeof(TraceEntry))
    return false;
  if (!std::has_single_bit(header.entries) || header.entries > kMostEntries || header.rank < 0 ||
      header.rank >= header.world_size || header.world_size > kMostRanks)
    return false;
  return bytes == kHeaderBytes + kGroups * sizeof(GroupSlot) +
                      std::size_t{header.entries} * sizeof(TraceEntry);
}

/// `completed` is from a copy that is older than `slot`: a call is started before it is completed.
GroupTrace group_of(const GroupSlot& slot, std::uint64_t completed) {
  GroupTrace group;
  group.name =
      text_of(slot.name) + (slot.occurrence > 1 ? " #" + std::to_string(slot.occurrence) : "");
  group.size = slot.size;
  group.rank = slot.rank;
  for (int member = 0; member < kMembersShown; ++member) {
    if ((slot.members[static_cast<std::size_t>(member) / 64] >> (member % 64) & 1) != 0)
      group.members.push_back(member);
  }
  group.completed = completed;
  group.started = slot.started;
  return group;
}

enum class StampState : std::uint8_t { nothing, entry, torn };

StampState look_at(const ThreeCopies<TraceEntry>& copies, std::size_t at) {
  const std::uint64_t stamp = copies.before[at].stamp;
  if (stamp == 0) return StampState::nothing;
  return (stamp & 1) == 0 && copies.after[at].stamp == stamp ? StampState::entry : StampState::torn;
}

/// Calls `take(body, outcome, ticket)` for each of the ring's entries; returns how many changed
/// whenever they were read.
template <class Take>
std::uint64_t each_entry(TraceFile& file, std::size_t offset, std::size_t entries,
                         const Take& take) {
  constexpr std::size_t kBlock = 512;
  std::uint64_t torn = 0;
  ThreeCopies<TraceEntry> block(kBlock), one(1);
  const auto take_from = [&](const ThreeCopies<TraceEntry>& copies, std::size_t at) {
    const TraceEntry& entry = copies.middle[at];
    take(std::bit_cast<Body>(entry.words), entry.outcome, copies.before[at].stamp / 2);
  };
  for (std::size_t first = 0; first < entries && !file.cut_short(); first += kBlock) {
    const std::size_t count = std::min(kBlock, entries - first);
    block.read(file, offset + first * sizeof(TraceEntry), count);
    for (std::size_t at = 0; at < count; ++at) {
      StampState found = look_at(block, at);
      if (found == StampState::entry) take_from(block, at);
      for (int attempt = 1; found == StampState::torn && attempt < kAttempts; ++attempt) {
        one.read(file, offset + (first + at) * sizeof(TraceEntry), 1);
        found = look_at(one, 0);
        if (found == StampState::entry) take_from(one, 0);
      }
      if (found == StampState::torn) ++torn;
    }
  }
  return torn;
}

Record record_of(const Body& body, std::uint64_t outcome, std::uint64_t ticket,
                 std::int64_t to_wall, std::size_t groups) {
  Record record;
  record.ticket = ticket;
  record.sequence = body.sequence;
  record.start_ns = body.start_ns + to_wall;
  record.bytes = body.bytes;
  record.tag = body.tag;
  record.dimensions = body.dimensions;
  record.shape.assign(body.shape,
                      body.shape + std::min<std::size_t>(body.dimensions, std::size(body.shape)));
  record.name = text_of(body.name);
  if (body.dtype < kDTypes)
    record.dtype = std::string(muster::name_of(static_cast<DType>(body.dtype)));
  record.peer = body.peer;
  record.thread = body.thread;
  record.group = std::min<std::size_t>(body.group, groups - 1);
  record.state = body.state;
  if (is_outcome_of(outcome, ticket)) {
    record.state = state_in(outcome);
    record.end_ns = record.start_ns + static_cast<std::int64_t>(took_in(outcome));
  }
  record.async = body.async != 0;
  return record;
}

void copy_failure(TraceFile& file, std::int64_t to_wall, RankTrace& trace) {
  ThreeCopies<FileHeader> header(1);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    header.read(file, 0, 1);
    const std::uint64_t stamp = header.before[0].failure_stamp;
    if (stamp == 0) return;
    if ((stamp & 1) != 0 || header.after[0].failure_stamp != stamp) continue;
    const FileHeader& found = header.middle[0];
    const char* text = reinterpret_cast<const char*>(found.failure.data());
    trace.failure.assign(text, ::strnlen(text, sizeof found.failure));
    trace.failure_at_ns = found.failure_at_ns + to_wall;
    return;
  }
}

/// The lock tells whether a process can still write. The kernel is asked for the writer's state
/// only in its own pid namespace, and only for the process that started when it did: any other has
/// merely the same number.
Life life_of(int file, const FileHeader& header, const std::string& boot) {
  const std::string here = boot_id();
  if (!here.empty() && boot != here) return Life::gone;
  const bool open = is_live(file);
  const bool can_ask = header.pid_start != 0 && header.pid_namespace != 0 &&
                       header.pid_namespace == namespace_inode("pid");
  const ProcessState state =
      can_ask ? process_state(header.pid, header.pid_start) : ProcessState::unknown;
  if (open) return state == ProcessState::stopped ? Life::stopped : Life::running;
  return state == ProcessState::unknown ? Life::gone : Life::left;
}

}  // namespace

const char* name_of(Life life) {
  switch (life) {
    case Life::running: return "running";
    case Life::stopped: return "stopped";
    case Life::left: return "left";
    case Life::gone: break;
  }
  return "gone";
}

bool is_written_by(const RankTrace& trace, std::int64_t pid) {
  return trace.pid == pid && trace.pid_namespace == namespace_inode("pid") &&
         trace.boot == boot_id();
}

const GroupTrace* RankTrace::group(const std::string& name) const {
  const auto at = std::find_if(groups.begin(), groups.end(),
                               [&](const auto& group) { return group.name == name; });
  return at == groups.end() ? nullptr : &*at;
}

std::int64_t wall_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Result<RankTrace> read_trace(const std::string& path) {
  const auto opened = open_own_file(path, O_RDONLY, {.name = "the trace", .root_may_look = true});
  if (!opened) return opened.status();
  struct stat info {};
  if (::fstat(opened->get(), &info) != 0)
    return Status(Code::invalid_argument, "cannot look at " + path + ": " + errno_text(errno));
  TraceFile file(opened->get());
  FileHeader header{};
  file.read(0, std::span(&header, 1));
  if (!is_whole(header, static_cast<std::size_t>(info.st_size)))
    return Status(Code::invalid_argument, path + " is no whole trace of this version of muster");

  RankTrace trace;
  trace.path = path;
  trace.host = text_of(header.host);
  trace.boot = text_of(header.boot);
  trace.job = text_of(header.job);
  trace.run_id = text_of(header.run_id);
  trace.rank = header.rank;
  trace.world_size = header.world_size;
  trace.pid = header.pid;
  trace.pid_namespace = header.pid_namespace;
  trace.since_ns = header.wall_base_ns;
  trace.life = life_of(opened->get(), header, trace.boot);
  // On the writer's host and boot both clocks can be read now, so steps of the wall clock since the
  // start are corrected.
  const std::int64_t to_wall =
      trace.life == Life::gone ? header.wall_base_ns - header.mono_base_ns
                               : wall_now_ns() - steady_clock().now().time_since_epoch().count();
  const auto groups =
      static_cast<std::size_t>(std::min<std::uint64_t>(header.group_count, kGroups));
  std::vector<GroupSlot> before(groups), slots(groups);
  file.read(kHeaderBytes, std::span(before));
  file.read(kHeaderBytes, std::span(slots));
  for (std::size_t i = 0; i < groups; ++i)
    trace.groups.push_back(group_of(slots[i], before[i].completed));
  trace.calls = header.tickets;
  trace.dropped = header.dropped;
  trace.failures = header.failures;
  trace.torn =
      each_entry(file, kHeaderBytes + kGroups * sizeof(GroupSlot), groups > 0 ? header.entries : 0,
                 [&](const Body& body, std::uint64_t outcome, std::uint64_t ticket) {
                   trace.records.push_back(record_of(body, outcome, ticket, to_wall, groups));
                 });
  std::sort(trace.records.begin(), trace.records.end(),
            [](const auto& a, const auto& b) { return a.ticket < b.ticket; });
  copy_failure(file, to_wall, trace);
  if (file.cut_short())
    return Status(Code::invalid_argument, path + " was cut short while it was read");
  return trace;
}

const RankTrace* JobTrace::rank(int number) const {
  const auto at = std::find_if(ranks.begin(), ranks.end(),
                               [&](const auto& trace) { return trace.rank == number; });
  return at == ranks.end() ? nullptr : &*at;
}

std::int64_t JobTrace::now_ns() const {
  std::int64_t last = 0;
  for (const auto& trace : ranks) {
    if (is_open(trace.life)) return wall_now_ns();
    last = std::max({last, trace.since_ns, trace.failure_at_ns});
    for (const auto& record : trace.records)
      last = std::max({last, record.start_ns, record.end_ns});
  }
  return last;
}

bool all_are_gone(const JobTrace& job) {
  return std::all_of(job.ranks.begin(), job.ranks.end(),
                     [](const RankTrace& trace) { return trace.life == Life::gone; });
}

Result<JobTrace> read_job(const std::string& directory) {
  JobTrace job;
  job.directory = directory;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("rank") || !name.ends_with(".trace")) continue;
    auto trace = read_trace(entry.path().string());
    if (trace) {
      job.ranks.push_back(std::move(*trace));
    } else {
      job.unread.push_back(trace.status().message());
    }
  }
  if (error)
    return Status(Code::invalid_argument,
                  "cannot read the directory " + directory + ": " + error.message());
  if (job.ranks.empty()) {
    std::string why;
    for (const auto& text : job.unread) why += "; " + text;
    return Status(Code::invalid_argument, "there is no trace in " + directory + why);
  }
  std::sort(job.ranks.begin(), job.ranks.end(),
            [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return job;
}

Result<std::string> find_job(const std::string& path) {
  if (read_job(path)) return path;
  for (const auto& job : list_jobs(path)) {
    if (read_job(job.path)) return job.path;
  }
  return Status(Code::invalid_argument,
                "there are no traces in " + path +
                    ": ranks remove theirs when a job ends well, and keep none with "
                    "MUSTER_TRACE_ENTRIES=0; they look for the directory in "
                    "MUSTER_RUN_DIR, then XDG_RUNTIME_DIR");
}

namespace {

/// The first job below `base`, the latest first, that `is_it`.
template <class Test>
std::optional<std::string> first_job(const std::string& base, std::int64_t since_ns, Test is_it) {
  for (const auto& directory : list_jobs(base)) {
    if (directory.changed_ns < since_ns) break;
    const auto job = read_job(directory.path);
    if (job && std::any_of(job->ranks.begin(), job->ranks.end(), is_it)) return directory.path;
  }
  return std::nullopt;
}

}  // namespace

Result<std::string> find_job_of(const std::string& base, std::int64_t pid, std::int64_t since_ns) {
  if (auto found =
          first_job(base, since_ns, [&](const auto& trace) { return is_written_by(trace, pid); }))
    return *found;
  return Status(
      Code::invalid_argument,
      "process " + std::to_string(pid) + " has no trace in " + base +
          "; where the job ran with another MUSTER_RUN_DIR, give its directory with --dir");
}

Result<std::string> find_job_called(const std::string& base, const std::string& name,
                                    std::int64_t since_ns) {
  const std::string kept = name.substr(0, sizeof(FileHeader::run_id) - 1);
  if (auto found = first_job(base, since_ns, [&](const RankTrace& trace) {
        return trace.run_id == kept || trace.job == name;
      }))
    return *found;
  return Status(Code::invalid_argument, "no job called \"" + name + "\" has traces in " + base +
                                            ": a job is called what --rdzv-id says, and its ranks "
                                            "remove their traces when it ends well");
}

std::vector<JobTrace> live_jobs_but(const std::string& base, const std::string& shown) {
  std::vector<JobTrace> jobs;
  for (const auto& directory : list_jobs(base)) {
    auto job = directory.path == shown ? Result<JobTrace>(Status(Code::invalid_argument, "shown"))
                                       : read_job(directory.path);
    const auto lives = [](const RankTrace& trace) { return is_open(trace.life); };
    if (job && std::any_of(job->ranks.begin(), job->ranks.end(), lives))
      jobs.push_back(std::move(*job));
  }
  return jobs;
}

}  // namespace muster::trace
