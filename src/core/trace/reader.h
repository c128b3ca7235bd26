// SPDX-License-Identifier: BSD-3-Clause
/// Traces as values: whole copies of what stands in the files, live or left behind, and their form
/// as bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace/format.h"
#include "muster/status.h"

namespace muster::trace {

/// All times are wall clock, nanoseconds since 1970.
struct Record {
  std::uint64_t ticket = 0;
  std::uint64_t sequence = 0;  ///< 0: point-to-point
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;  ///< 0 while it is under way
  std::uint64_t bytes = 0;
  std::int64_t tag = 0;
  std::vector<std::int64_t> shape;  ///< at most four dimensions
  int dimensions = 0;
  std::string name, dtype;
  int peer = -1;
  std::uint32_t thread = 0;
  std::size_t group = 0;  ///< index into RankTrace::groups
  State state = State::started;
  bool async = false;

  bool under_way() const { return state == State::queued || state == State::started; }
};

struct GroupTrace {
  std::string name;  ///< with " #2" for the second group of this name
  int size = 0;
  int rank = -1;
  std::vector<int> members;  ///< job ranks, sorted; those below kMembersShown
  std::uint64_t started = 0, completed = 0;
};

enum class Life : std::uint8_t {
  running,
  stopped,
  gone,
  left,  ///< the process lives and has closed this trace: between epochs, or after its group. Not
         ///< seen from another pid namespace, where such a rank is `gone`
};
const char* name_of(Life life);
/// Whether a process can still write to it.
constexpr bool is_open(Life life) { return life == Life::running || life == Life::stopped; }

struct RankTrace {
  std::string path, host, boot, job, run_id;
  int rank = 0, world_size = 1;
  std::int64_t pid = 0;
  std::uint64_t pid_namespace = 0;  ///< as in the header; 0 too for a trace that was sent
  std::int64_t since_ns = 0;
  Life life = Life::gone;
  std::vector<GroupTrace> groups;
  std::vector<Record> records;  ///< in the order of the calls
  std::uint64_t calls = 0;      ///< made so far, those that the ring has forgotten included
  std::uint64_t dropped = 0;
  std::uint64_t torn = 0;  ///< entries that changed while they were read
  std::uint64_t failures = 0;
  std::string failure;  ///< text of the last call that failed
  std::int64_t failure_at_ns = 0;

  const GroupTrace* group(const std::string& name) const;
  /// The latest call that this trace holds; null where there is none.
  const Record* latest() const { return records.empty() ? nullptr : &records.back(); }
};

/// Whether `pid`, in this process's pid namespace, has written the trace. Hosts that share a folder
/// of traces may have namespaces of the same number.
bool is_written_by(const RankTrace& trace, std::int64_t pid);

/// One rank's file. Refuses files of other users (root may read all), symbolic links, and files
/// that are not a complete trace of this version.
Result<RankTrace> read_trace(const std::string& path);

/// A job, by rank. Code::invalid_argument where there is no trace; files that cannot be read are
/// named in `unread`.
struct JobTrace {
  std::string directory;
  std::vector<RankTrace> ranks;
  std::vector<std::string> unread;

  const RankTrace* rank(int number) const;
  int world_size() const { return ranks.empty() ? 0 : ranks.front().world_size; }
  /// The latest instant that any of the traces knows of; the present where a rank lives.
  std::int64_t now_ns() const;
};
/// Whether nothing of the job can change any more. Ranks that wait for the next epoch of their job
/// have left their traces, and the job goes on.
bool all_are_gone(const JobTrace& job);
Result<JobTrace> read_job(const std::string& directory);

/// The job's directory that is meant: `path` itself where it holds traces, else the latest job
/// below it.
Result<std::string> find_job(const std::string& path);
/// The job below `base` that a process writes or wrote to; none that was last changed before
/// `since_ns`.
Result<std::string> find_job_of(const std::string& base, std::int64_t pid,
                                std::int64_t since_ns = 0);
/// The latest job below `base` whose launcher called it `name` (--rdzv-id), or that is called so in
/// its traces.
Result<std::string> find_job_called(const std::string& base, const std::string& name,
                                    std::int64_t since_ns = 0);
/// The jobs below `base` that a process is writing to, except `shown`, the latest first.
std::vector<JobTrace> live_jobs_but(const std::string& base, const std::string& shown);

std::int64_t wall_now_ns();

// Traces as bytes, for those who cannot open the file: ranks and people on other hosts get them
// through the job's store.

/// Only the latest call of each group, and of the groups only the latest 32: some hundred bytes
/// each.
RankTrace cut_to_latest(const RankTrace& trace);
/// Only the latest `records` calls.
RankTrace cut_to(RankTrace trace, std::size_t records);

/// All of it. Begins with the present instant, by this host's clock.
std::string encode_trace(const RankTrace& trace);

struct SentTrace {
  RankTrace trace;
  std::int64_t as_of_ns = 0;  ///< when it was written, by its writer's clock
};
/// Nothing where the bytes are damaged or of another version.
std::optional<SentTrace> decode_trace(std::string_view bytes);

/// Moves every time by so much: from another host's clock to this one's.
void shift(RankTrace& trace, std::int64_t by_ns);

}  // namespace muster::trace
