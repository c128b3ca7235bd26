// SPDX-License-Identifier: BSD-3-Clause
/// Multicast announcements by which the processes of a job find each other: fixed-size datagrams
/// signed with the job's secret. Encoding only; no I/O.
///
/// A signature alone can be replayed. Every process therefore counts its announcements under a
/// random number and repeats the counts that it has heard of others. A process that repeats a
/// recent count of this one has heard it lately, which no recording has. The address of the store
/// is signed too; that of the datagram proves nothing. Announcements are sent by the clock and all
/// have one size: nothing that comes makes a process send more.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/security/secret.h"
#include "muster/clock.h"

namespace muster::store {

/// The latest announcement count heard from another process.
struct Echo {
  std::uint64_t id = 0;
  std::uint32_t count = 0;
};

struct Announcement {
  std::uint64_t id = 0;  ///< the process's unique random number
  std::int32_t rank = -1;
  std::int32_t world_size = 0;
  std::uint16_t store_port = 0;  ///< 0: no store yet
  std::string store_host{};      ///< its address in digits, without a scope; at most 46 characters
  std::uint32_t count = 0;       ///< of this process's announcements so far
  std::vector<Echo> heard{};     ///< at most kEchoes
};
/// Hash of the job's name: distinguishes jobs that share an address and a secret.
using GroupHash = std::array<std::byte, 16>;

inline constexpr std::size_t kEchoes = 64;     // limit: a datagram that fits every network
inline constexpr std::size_t kHostBytes = 46;  // limit: the longest address in digits
inline constexpr std::size_t kAnnouncementBytes =
    8 + sizeof(GroupHash) + 8 + 4 + 4 + 2 + kHostBytes + 4 + kEchoes * 12 + sizeof(Secret::Proof);

std::string encode(const Announcement& announcement, const GroupHash& group, const Secret& secret);
/// Empty for packets that do not belong to this job. No field is read before the signature is
/// verified.
std::optional<Announcement> decode_announcement(std::string_view packet, const GroupHash& group,
                                                const Secret& secret);

/// Whether `said` proves that its sender has heard one of the last `window` announcements of the
/// process `id`, which has made `count` of them.
bool is_fresh(const Announcement& said, std::uint64_t id, std::uint32_t count,
              std::uint32_t window);

/// The counts received, and which of them the next announcement repeats: those that increase. A
/// recording's counts increase only until it has been replayed once, so it cannot crowd out running
/// processes for longer than it lasts. Not thread-safe.
class HeardCounts {
 public:
  /// A process counts as running for `forgotten` after its count has risen.
  explicit HeardCounts(Duration forgotten, std::size_t most = 1U << 14)
      : forgotten_(forgotten), most_(most) {}

  void note(std::uint64_t id, std::uint32_t count, TimePoint now);
  /// At most kEchoes; if more increase, they take turns.
  std::vector<Echo> next(TimePoint now);

 private:
  struct Heard {
    std::uint32_t count = 0;
    TimePoint rose;
  };
  const Duration forgotten_;
  const std::size_t most_;  // limit: memory that recordings can take
  std::map<std::uint64_t, Heard> heard_;
  std::uint64_t last_ = 0;  // the last one repeated
};

}  // namespace muster::store
