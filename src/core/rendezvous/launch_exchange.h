// SPDX-License-Identifier: BSD-3-Clause
/// Tells the ranks that mpirun has started rank 0's address, before they are connected: by PMI-1
/// (Hydra's of MPICH and Intel MPI) or PMIx (Open MPI's).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/rendezvous/scheduler.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store {

/// Returns rank 0's `text` on every rank; at most 400 bytes. All ranks of the job call it, equally
/// often. Code::timed_out at the deadline; Code::unsupported where this build or this host lacks
/// what it needs, with what to do instead. Not thread-safe.
Result<std::string> share_from_rank_zero(SchedulerRanks::AddressExchange kind, int rank,
                                         std::string_view text, TimePoint deadline);

/// One line of PMI-1's wire protocol, "cmd=put kvsname=k key=a value=b", as its words. Nothing
/// where it is no such line.
std::optional<std::map<std::string, std::string>> parse_pmi_line(std::string_view line);

namespace exchange_detail {
Result<std::string> share_by_pmi(int rank, std::string_view text, TimePoint deadline);
Result<std::string> share_by_pmix(int rank, std::string_view text, TimePoint deadline);
/// The name of the next text that is shared: each call of a process has another.
std::string next_key();
}  // namespace exchange_detail

}  // namespace muster::store
