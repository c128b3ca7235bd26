// SPDX-License-Identifier: BSD-3-Clause
/// The keys of a job that its store knows too: where ranks meet to join it, which stores keep from
/// others and count, and what rank 0 says of the running job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace muster::store {

/// The key under which the ranks meet to join, and the job's name derived from the tokens all of
/// them contributed.
std::string join_key(const std::string& scope, const std::string& group_name);
bool is_join_key(std::string_view key);
std::string job_of(std::string_view join_key, std::string_view all_tokens);

// Rank 0 of a running job announces it in the store, under `trace/job`: tools ask its ranks
// (`core/trace/responder.h`), and the server lets observers ask no others (`observer_rights.h`).

inline constexpr std::string_view kJobKey = "trace/job";
/// No job has more: what says so is damaged.
inline constexpr int kMostAnnouncedRanks = 1 << 20;  // limit: a world size that is a mistake

struct JobAnnouncement {
  std::string job;
  int world_size = 0;
  std::int64_t since_ns = 0;
};

std::string encode(const JobAnnouncement& job);
/// Nothing where the bytes are damaged or of another version.
std::optional<JobAnnouncement> decode_job(std::string_view bytes);

}  // namespace muster::store
