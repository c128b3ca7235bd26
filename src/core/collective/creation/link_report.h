// SPDX-License-Identifier: BSD-3-Clause
/// What the members of a new group tell each other of their links, and what follows for its plans:
/// how much is on the wire, and the order of a ring through all of them. Only performance depends
/// on it, but all members must use the same.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/transport/fabric.h"

namespace muster::collective {

/// Groups of more members keep the order of their members.
inline constexpr std::size_t kMostOrdered = 128;  // limit: bytes of a note

/// Members by their place in a ring; of n members the first n. All 0: in the order of members. Also
/// the wire format.
using MemberOrder = std::array<std::uint8_t, kMostOrdered>;

/// One member's links to the others. Also the wire format.
struct LinkReport {
  /// Logarithms to the base 1.1, from 1 on: what is measured differs as much at times. 0: unknown.
  struct HopClass {
    std::uint8_t rate = 0;        ///< of bytes a second
    std::uint8_t round_trip = 0;  ///< of microseconds
    friend bool operator==(const HopClass&, const HopClass&) = default;
  };
  /// Connections that the longest of its links to the members needs; 1 without such a link.
  std::uint64_t strands = 1;
  /// By member; those of its own host are the fastest. Left out in larger groups.
  std::array<HopClass, kMostOrdered> hops{};
};

/// By what the kernel has measured so far. Nothing is read if all members are on one host.
LinkReport report_links(const transport::Fabric& fabric, std::span<const int> members);

std::uint64_t most_strands(std::span<const LinkReport> reports);
/// The order in which a ring is fastest (`ring_order`), if the way is long and every member knows
/// the rate of each of its links; otherwise that of the members. Computed by one member for all:
/// the numbers of another processor could round differently.
MemberOrder order_by_rates(std::span<const LinkReport> reports);
/// As plans take it: empty unless it is an order of these many members.
std::vector<std::uint8_t> places_of(const MemberOrder& order, int size);

}  // namespace muster::collective
