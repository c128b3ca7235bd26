#include "muster/trace/reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "muster/base/clock.h"
#include "muster/base/descriptor.h"
#include "muster/base/dtype.h"
#include "muster/base/process_start.h"
#include "muster/base/socket_address.h"
#include "muster/trace/run_directory.h"

namespace muster::trace {
namespace {

constexpr int kAttempts = 100;

template <std::size_t Size>
std::string text_of(const char (&field)[Size]) {
  return std::string(field, ::strnlen(field, Size));
}

/// A file mapped for reading, as long as this lives.
class Mapping {
 public:
  Mapping(int file, std::size_t bytes)
      : bytes_(bytes), memory_(::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0)) {}
  ~Mapping() {
    if (*this) ::munmap(memory_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  explicit operator bool() const { return memory_ != MAP_FAILED; }
  template <class T>
  const T* at(std::size_t offset) const {
    return reinterpret_cast<const T*>(static_cast<const std::byte*>(memory_) + offset);
  }

 private:
  std::size_t bytes_;
  void* memory_;
};

bool is_whole(const FileHeader& header, std::size_t bytes) {
  if (header.magic != kMagic || header.version != kVersion || header.header_bytes != kHeaderBytes ||
      header.group_bytes != sizeof(GroupSlot) || header.groups != kGroups ||
      header.entry_bytes != sizeof(Entry))
    return false;
  if (!std::has_single_bit(header.entries) || header.entries > kMostEntries || header.rank < 0 ||
      header.rank >= header.world_size)
    return false;
  return bytes ==
         kHeaderBytes + kGroups * sizeof(GroupSlot) + std::size_t{header.entries} * sizeof(Entry);
}

GroupTrace group_of(const GroupSlot& slot) {
  GroupTrace group;
  group.name =
      text_of(slot.name) + (slot.occurrence > 1 ? " #" + std::to_string(slot.occurrence) : "");
  group.size = slot.size;
  group.rank = slot.rank;
  for (int member = 0; member < kMembersShown; ++member) {
    if ((load(slot.members[static_cast<std::size_t>(member) / 64]) >> (member % 64) & 1) != 0)
      group.members.push_back(member);
  }
  // In this order: a call is started before it is completed.
  group.completed = load(slot.completed);
  group.started = load(slot.started);
  return group;
}

/// False where the entry is empty; counts torn ones.
bool copy(const Entry& entry, Body& body, std::uint64_t& outcome, std::uint64_t& ticket,
          std::uint64_t& torn) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::uint64_t before = load(entry.stamp);
    if (before == 0) return false;
    if ((before & 1) != 0) continue;
    Words words;
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = load(entry.words[i]);
    outcome = load(entry.outcome);
    if (load(entry.stamp) != before) continue;
    body = std::bit_cast<Body>(words);
    ticket = before / 2;
    return true;
  }
  ++torn;
  return false;
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

void copy_failure(const FileHeader& header, std::int64_t to_wall, RankTrace& trace) {
  trace.failures = load(header.failures);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::uint64_t before = load(header.failure_stamp);
    if (before == 0) return;
    if ((before & 1) != 0) continue;
    std::array<std::uint64_t, std::tuple_size_v<decltype(FileHeader::failure)>> words;
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = load(header.failure[i]);
    const auto at = static_cast<std::int64_t>(
        std::atomic_ref(const_cast<std::int64_t&>(header.failure_at_ns)).load());
    if (load(header.failure_stamp) != before) continue;
    const char* text = reinterpret_cast<const char*>(words.data());
    trace.failure.assign(text, ::strnlen(text, sizeof words));
    trace.failure_at_ns = at + to_wall;
    return;
  }
}

Life life_of(int file, std::int64_t pid, const std::string& boot) {
  const std::string here = boot_id();
  if ((!here.empty() && boot != here) || !is_live(file)) return Life::gone;
  std::string line;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), line);
  const auto name_end = line.rfind(") ");
  const char state =
      name_end == std::string::npos || name_end + 2 >= line.size() ? 'R' : line[name_end + 2];
  return state == 'T' || state == 't' ? Life::stopped : Life::running;
}

}  // namespace

const char* name_of(Life life) {
  switch (life) {
    case Life::running: return "running";
    case Life::stopped: return "stopped";
    case Life::gone: break;
  }
  return "gone";
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
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0)
    return Status(Code::invalid_argument, "cannot open " + path + ": " + errno_text(errno));
  if (!S_ISREG(info.st_mode) || (info.st_uid != ::geteuid() && ::geteuid() != 0))
    return Status(Code::refused, path + " is not a file of this user");
  const auto bytes = static_cast<std::size_t>(info.st_size);
  const auto damaged =
      Status(Code::invalid_argument, path + " is no whole trace of this version of muster");
  if (bytes < kHeaderBytes) return damaged;
  const Mapping mapping(file.get(), bytes);
  if (!mapping)
    return Status(Code::invalid_argument, "cannot map " + path + ": " + errno_text(errno));
  const FileHeader& header = *mapping.at<FileHeader>(0);
  if (!is_whole(header, bytes)) return damaged;

  RankTrace trace;
  trace.path = path;
  trace.host = text_of(header.host);
  trace.boot = text_of(header.boot);
  trace.job = text_of(header.job);
  trace.run_id = text_of(header.run_id);
  trace.rank = header.rank;
  trace.world_size = header.world_size;
  trace.pid = header.pid;
  trace.since_ns = header.wall_base_ns;
  trace.life = life_of(file.get(), header.pid, trace.boot);
  // On the writer's host and boot both clocks are at hand now: steps of the wall clock since the
  // start are taken out.
  const std::int64_t to_wall =
      trace.life == Life::gone ? header.wall_base_ns - header.mono_base_ns
                               : wall_now_ns() - steady_clock().now().time_since_epoch().count();
  const auto groups = std::min<std::uint64_t>(load(header.group_count), kGroups);
  for (std::uint64_t i = 0; i < groups; ++i)
    trace.groups.push_back(group_of(mapping.at<GroupSlot>(kHeaderBytes)[i]));
  trace.calls = load(header.tickets);
  trace.dropped = load(header.dropped);
  const Entry* entries = mapping.at<Entry>(kHeaderBytes + kGroups * sizeof(GroupSlot));
  for (std::uint32_t i = 0; i < header.entries && groups > 0; ++i) {
    Body body;
    std::uint64_t outcome = 0, ticket = 0;
    if (copy(entries[i], body, outcome, ticket, trace.torn))
      trace.records.push_back(record_of(body, outcome, ticket, to_wall, trace.groups.size()));
  }
  std::sort(trace.records.begin(), trace.records.end(),
            [](const auto& a, const auto& b) { return a.ticket < b.ticket; });
  copy_failure(header, to_wall, trace);
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
    if (trace.life != Life::gone) return wall_now_ns();
    last = std::max({last, trace.since_ns, trace.failure_at_ns});
    for (const auto& record : trace.records)
      last = std::max({last, record.start_ns, record.end_ns});
  }
  return last;
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
          first_job(base, since_ns, [&](const RankTrace& trace) { return trace.pid == pid; }))
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
    const auto lives = [](const RankTrace& trace) { return trace.life != Life::gone; };
    if (job && std::any_of(job->ranks.begin(), job->ranks.end(), lives))
      jobs.push_back(std::move(*job));
  }
  return jobs;
}

}  // namespace muster::trace
