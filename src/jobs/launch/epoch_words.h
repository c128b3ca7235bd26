// SPDX-License-Identifier: BSD-3-Clause
/// Sentences that the launcher says of the epochs of its job.
#pragma once

#include <cstdint>
#include <string>

#include "jobs/launch/options.h"
#include "jobs/launch/workers/node_workers.h"
#include "jobs/membership/membership.h"
#include "muster/clock.h"

namespace muster::launch {

/// The workers that were left stay.
std::string repair_text(const membership::Epoch& epoch, const NodeWorkers::Repair& done,
                        int max_restarts);
/// All workers of this node start again; those of other nodes too, unless `keep`.
std::string restart_text(const membership::Epoch& epoch, int max_restarts, bool keep);
/// The workers are about to start, after those of the epoch `before` (0: none). Empty for the job's
/// first epoch on as many nodes as may be, and on a node that joins a job which runs.
std::string start_text(const membership::Epoch& epoch, const RunOptions& options,
                       std::int64_t before, bool keep);
/// The first node of an elastic job waits for others, if they may come; else empty.
std::string waiting_text(const RunOptions& options);
/// No rank of the epoch has more of the commits than the first `kept`. `fails`: the job ends for
/// it.
std::string loss_text(std::int64_t epoch, const NodeWorkers::LostCommits& lost, bool fails);
/// For workers that the node's leaving of `epoch` tells to leave.
WorkerNotice leave_notice(std::int64_t epoch, int signal);
/// The node's workers were told to leave. `goes_on`: the job may go on without this node.
std::string leaving_text(int signal, Duration grace, bool goes_on);
/// For workers that stay; the launcher adds addresses and commits.
WorkerNotice repair_notice(const membership::Epoch& epoch);
/// An epoch left the node out, whose workers run. The same epoch, or a later one, may have a place
/// for it again.
std::string left_out_text(std::int64_t epoch);
/// An epoch left the node out, and its workers have not given their last commit within the time.
std::string given_up_text(Duration time);
/// A worker was stopped for the time, and is ended.
std::string stopped_text(int rank, Duration time);

}  // namespace muster::launch
