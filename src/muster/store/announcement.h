/// Multicast announcements by which the processes of a job find each other: fixed-size datagrams
/// signed with the job's secret. Encoding only; no I/O.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "muster/base/secret.h"

namespace muster::store {

struct Announcement {
  std::uint64_t id = 0;  ///< the process's unique number
  std::int32_t rank = -1;
  std::int32_t world_size = 0;
  std::uint16_t store_port = 0;  ///< 0: no store yet
};
/// Hash of the job's name: distinguishes jobs that share an address and a secret.
using GroupHash = std::array<std::byte, 16>;

inline constexpr std::size_t kAnnouncementBytes =
    8 + sizeof(GroupHash) + 8 + 4 + 4 + 2 + sizeof(Secret::Proof);

std::string encode(const Announcement& announcement, const GroupHash& group, const Secret& secret);
/// Empty for packets that do not belong to this job. No field is read before the signature is
/// verified.
std::optional<Announcement> decode_announcement(std::string_view packet, const GroupHash& group,
                                                const Secret& secret);

}  // namespace muster::store
