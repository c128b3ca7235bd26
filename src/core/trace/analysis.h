// SPDX-License-Identifier: BSD-3-Clause
/// Compares the traces of a job's ranks. Pure functions on values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/trace/reader.h"

namespace muster::trace {

/// Why ranks hold up a group, the most certain first.
enum class Reason : std::uint8_t {
  different,    ///< they have made another call under that number, and the group has failed
  not_entered,  ///< they have not made the call that others wait in
  gone,         ///< they have, but their process is no more
  stopped,      ///< they have, but their process stands still
  unfinished,   ///< all are in the same call; these have completed the fewest
};

struct Holdup {
  std::string group;
  std::uint64_t sequence = 0;  ///< of the call that the others wait in
  std::string call;            ///< "all_reduce of 16 bytes (float32 [4])"
  Reason reason = Reason::unfinished;
  std::vector<int> behind;     ///< job ranks
  std::string other_call;      ///< Reason::different: what the first of them called
  std::vector<int> waiting;    ///< those with a trace that are in the call, or failed in it
  std::int64_t since_ns = 0;   ///< when the first of them came
  std::int64_t failed_ns = 0;  ///< when the last of them failed there, if all have and left; else 0
  std::uint64_t gap = 0;       ///< calls between the first and the last member
  bool usual = false;  ///< all live, and the wait is not longer than a running job's waits may be
};

/// The groups that have a rank inside a call. Stalled and failed groups come first, by the largest
/// gap. A group whose members are all between calls is not included. Ranks of a healthy job enter a
/// call one after the other, so a wait of live ranks is `usual` up to one second, or up to twice
/// the longest of the group's last calls.
std::vector<Holdup> find_holdups(const JobTrace& job);

/// "all_reduce of 16 bytes (float32 [4])".
std::string describe(const Record& record);
/// "number 5, all_reduce of 16 bytes (float32 [4]), completed 3.1 s ago"; with the group's name
/// where `elsewhere`.
std::string describe(const Record& record, const RankTrace& trace, std::int64_t now_ns,
                     bool elsewhere);
/// "rank 2 has made 5 calls there; the last, number 5, ..., completed 3.1 s ago": what a rank did
/// last, on `group` and otherwise.
std::string last_act(const RankTrace& trace, const std::string& group, std::int64_t now_ns);
/// "rank 2", "ranks 1, 2 and 5"; at most ten, then how many more.
std::string list_ranks(std::span<const int> ranks);

/// "job 'job7', job-3b0d7be9, begun 3.2 min ago": the launcher's name for it (--rdzv-id) where
/// there was one, and that of the trace.
std::string title(const JobTrace& job);
/// "rank 2 is behind: ...", or that no rank is.
std::string headline(const JobTrace& job, const std::vector<Holdup>& holdups);
/// Plain text: the headline, every holdup, and a paragraph per rank.
std::string summary(const JobTrace& job);

/// Rates over the last `window`, or what the ring still covers of it.
struct Rates {
  double operations = 0;  ///< ended per second
  double bytes = 0;       ///< of those, per second
  double busy = 0;        ///< share of the time with at least one call under way, 0 to 1
};
Rates rates_of(const RankTrace& trace, std::int64_t now_ns, std::int64_t window_ns);

}  // namespace muster::trace
