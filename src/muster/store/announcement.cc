#include "muster/store/announcement.h"

#include "muster/base/bytes.h"

namespace muster::store {
namespace {

constexpr std::array<char, 8> kMagic{'m', 'u', 's', 't', 'e', 'r', 'm', '1'};
constexpr std::size_t kBodyBytes = kAnnouncementBytes - sizeof(Secret::Proof);

}  // namespace

std::string encode(const Announcement& announcement, const GroupHash& group, const Secret& secret) {
  ByteWriter out;
  out.put(kMagic)
      .put(group)
      .put(announcement.id)
      .put(announcement.rank)
      .put(announcement.world_size)
      .put(announcement.store_port);
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
  return announcement;
}

}  // namespace muster::store
