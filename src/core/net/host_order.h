// SPDX-License-Identifier: BSD-3-Clause
/// The order of hosts in which a ring over the links between them is fastest.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace muster {

/// Rates, or ways, that differ by less than this factor are alike: they differ as much when they
/// are measured twice.
inline constexpr double kMeasuredAlike = 1.1;  // limit: of what is measured

/// From one host to another.
struct HostHop {
  double bytes_per_s = 0;                  ///< 0: not known
  std::chrono::microseconds round_trip{};  ///< 0: not known
};

/// The slowest hop of a ring over the hosts in this order: all others wait for it. `hops` has
/// those from each host to each host, from the first one on.
double slowest_hop(std::span<const HostHop> hops, std::span<const std::size_t> order);

/// The order whose slowest hop is fastest, and among those that are alike in this the one with the
/// shortest way around: hosts of one site stand together. It begins with host 0. The same numbers
/// give the same order everywhere. Exact for up to 8 hosts; for more the best that moving hosts and
/// turning parts of the ring finds.
///
/// Absent where the order of the numbers should stay: a rate between two hosts is not known, what
/// would be won is less than a tenth, or the hosts are more than 256.
std::optional<std::vector<std::size_t>> ring_order(std::span<const HostHop> hops,
                                                   std::size_t hosts);

}  // namespace muster
