// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/job_keys.h"

#include "core/base/bytes.h"
#include "core/security/secret.h"

namespace muster::store {
namespace {

constexpr std::string_view kJoinPrefix = "muster/join/";

}  // namespace

std::string join_key(const std::string& scope, const std::string& group_name) {
  return std::string(kJoinPrefix) + scope + "/" + group_name;
}

bool is_join_key(std::string_view key) { return key.starts_with(kJoinPrefix); }

std::string job_of(std::string_view join_key, std::string_view all_tokens) {
  const std::string_view group_name = join_key.substr(join_key.find('/', kJoinPrefix.size()) + 1);
  return std::string(group_name.empty() ? "job" : group_name) + "-" +
         hexadecimal(short_hash(all_tokens));
}

namespace {

constexpr std::uint32_t kAnnouncementVersion = 2;

}  // namespace

std::string encode(const JobAnnouncement& job) {
  return ByteWriter()
      .put(kAnnouncementVersion)
      .put(job.world_size)
      .put(job.since_ns)
      .put_text(job.job)
      .take();
}

std::optional<JobAnnouncement> decode_job(std::string_view bytes) {
  ByteReader in(bytes);
  JobAnnouncement job;
  const auto version = in.get<std::uint32_t>();
  job.world_size = in.get<int>();
  job.since_ns = in.get<std::int64_t>();
  job.job = in.get_text();
  if (version != kAnnouncementVersion || !in.at_end() || job.world_size < 1 ||
      job.world_size > kMostAnnouncedRanks)
    return std::nullopt;
  return job;
}

}  // namespace muster::store
