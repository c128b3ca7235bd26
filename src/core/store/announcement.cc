// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/announcement.h"

#include <algorithm>

#include "core/base/bytes.h"

namespace muster::store {
namespace {

constexpr std::array<char, 8> kMagic{'m', 'u', 's', 't', 'e', 'r', 'm', '2'};
constexpr std::size_t kBodyBytes = kAnnouncementBytes - sizeof(Secret::Proof);

}  // namespace

std::string encode(const Announcement& announcement, const GroupHash& group, const Secret& secret) {
  std::string host = announcement.store_host.substr(0, kHostBytes);
  host.resize(kHostBytes, '\0');
  ByteWriter out;
  out.put(kMagic)
      .put(group)
      .put(announcement.id)
      .put(announcement.rank)
      .put(announcement.world_size)
      .put(announcement.store_port)
      .put_bytes(host)
      .put(announcement.count);
  for (std::size_t i = 0; i < kEchoes; ++i) {
    const Echo echo = i < announcement.heard.size() ? announcement.heard[i] : Echo{};
    out.put(echo.id).put(echo.count);
  }
  const Secret::Proof proof = secret.prove(as_bytes(out.view()));
  return out.take() + std::string(as_text(proof));
}

std::optional<Announcement> decode_announcement(std::string_view packet, const GroupHash& group,
                                                const Secret& secret) {
  if (packet.size() != kAnnouncementBytes) return std::nullopt;
  if (!equal_in_constant_time(secret.prove(as_bytes(packet.substr(0, kBodyBytes))),
                              as_bytes(packet.substr(kBodyBytes))))
    return std::nullopt;
  ByteReader in(packet);
  if (in.get<std::array<char, 8>>() != kMagic || in.get<GroupHash>() != group) return std::nullopt;
  Announcement announcement;
  announcement.id = in.get<std::uint64_t>();
  announcement.rank = in.get<std::int32_t>();
  announcement.world_size = in.get<std::int32_t>();
  announcement.store_port = in.get<std::uint16_t>();
  const auto host = in.get<std::array<char, kHostBytes>>();
  announcement.store_host.assign(host.begin(), std::find(host.begin(), host.end(), '\0'));
  announcement.count = in.get<std::uint32_t>();
  for (std::size_t i = 0; i < kEchoes; ++i) {
    Echo echo;
    echo.id = in.get<std::uint64_t>();
    echo.count = in.get<std::uint32_t>();
    if (echo.id != 0) announcement.heard.push_back(echo);
  }
  return announcement;
}

bool is_fresh(const Announcement& said, std::uint64_t id, std::uint32_t count,
              std::uint32_t window) {
  return std::any_of(said.heard.begin(), said.heard.end(), [&](const Echo& echo) {
    return echo.id == id && echo.count <= count && count - echo.count < window;
  });
}

void HeardCounts::note(std::uint64_t id, std::uint32_t count, TimePoint now) {
  if (const auto known = heard_.find(id); known != heard_.end()) {
    if (count > known->second.count) known->second = {count, now};
    return;
  }
  if (heard_.size() >= most_) {
    const auto oldest =
        std::ranges::min_element(heard_, {}, [](const auto& entry) { return entry.second.rose; });
    if (oldest->second.rose + forgotten_ >= now) return;
    heard_.erase(oldest);
  }
  heard_[id] = {count, now};
}

std::vector<Echo> HeardCounts::next(TimePoint now) {
  std::vector<Echo> echoes;
  auto at = heard_.upper_bound(last_);
  for (std::size_t seen = 0; seen < heard_.size() && echoes.size() < kEchoes; ++seen, ++at) {
    if (at == heard_.end()) at = heard_.begin();
    if (at->second.rose + forgotten_ < now) continue;
    echoes.push_back({at->first, at->second.count});
  }
  if (!echoes.empty()) last_ = echoes.back().id;
  return echoes;
}

}  // namespace muster::store
