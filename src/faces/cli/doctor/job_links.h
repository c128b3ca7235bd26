// SPDX-License-Identifier: BSD-3-Clause
/// `muster doctor --links`: the links between the hosts of a running job, as measured while the job
/// used them. Nothing is sent for it but the question.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/trace/responder.h"

namespace muster::cli {

/// From one host to another, of all ranks there: the best that was measured.
struct HostLink {
  std::size_t from = 0, to = 0;  ///< numbers of hosts
  double round_trip_ms = 0;      ///< 0: not measured yet
  double mbit_per_s = 0;         ///< 0: too little was sent to know
  double resent = 0;             ///< the part of the bytes that was sent more than once
};

struct HostLinks {
  std::vector<std::string> hosts;  ///< their names with their ranks: "node1 (ranks 0 and 1)"
  std::vector<HostLink> links;     ///< by `from`, then `to`; not of hosts that have none
};

double part_resent(std::uint64_t sent, std::uint64_t resent);

/// Links within a host are left out.
HostLinks links_between_hosts(const trace::AskedJob& job);

/// The numbers of the hosts in the order in which a ring of them is fastest, where that is another
/// one (`core/net/host_order.h`).
std::optional<std::vector<std::size_t>> ring_of(const HostLinks& links);

/// A matrix, a line each, and the order of a ring; of more than 12 hosts, the 12 slowest links.
std::vector<std::string> describe(const HostLinks& links);

}  // namespace muster::cli
