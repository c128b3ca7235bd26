// SPDX-License-Identifier: BSD-3-Clause
/// `muster doctor --links` as the ranks of a job: measures the links between its hosts.
///
/// The first rank of each host measures, each two hosts after the other: the shortest of some round
/// trips, then blocks in each direction, each larger than the last, until one tells the rate or is
/// the largest. So each host is in one measurement at a time, and a link of 10 Mbit/s takes 2 s.
#pragma once

#include <string>

#include "faces/cli/doctor/job_links.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::cli {

struct ProbedLinks {
  int rank = 0;     ///< this one; the links are rank 0's to tell
  HostLinks links;  ///< the same on every rank
};

/// Whether a block that was sent in this time tells a link's rate: it takes 0.3 s, and many of the
/// link's round trips, as its request and the slow start of TCP take some.
bool tells_rate(Duration sending, Duration round_trip);

/// Joins the job of the environment as one of its ranks (env://). Collective; blocks until all have
/// met and measured.
Result<ProbedLinks> probe_links();

}  // namespace muster::cli
