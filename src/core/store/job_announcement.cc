#include "core/store/job_announcement.h"

#include "core/base/bytes.h"

namespace muster::store {
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
