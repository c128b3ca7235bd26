// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/epoch_words.h"

namespace muster::launch {
namespace {

std::string number_text(const membership::Epoch& epoch, int max_restarts) {
  return " (epoch " + std::to_string(epoch.number) + ", restart " + std::to_string(epoch.restarts) +
         " of " + std::to_string(max_restarts) + ")";
}

}  // namespace

std::string repair_text(const membership::Epoch& epoch, const NodeWorkers::Repair& done,
                        int max_restarts) {
  return epoch.reason + "; of the workers here " + std::to_string(done.kept) + " stay, " +
         std::to_string(done.from_spares) + " are spares that step in, " +
         std::to_string(done.started) + " start anew" + number_text(epoch, max_restarts);
}

std::string restart_text(const membership::Epoch& epoch, int max_restarts) {
  const std::size_t nodes = epoch.members.size();
  return epoch.reason + "; starting all workers again on " + std::to_string(nodes) +
         (nodes == 1 ? " node" : " nodes") + number_text(epoch, max_restarts);
}

std::string loss_text(std::int64_t epoch, std::int64_t commits, bool fails) {
  return "the state of the job is lost: no rank of epoch " + std::to_string(epoch) +
         " has any of the " + std::to_string(commits) + " commits or more that were made before" +
         (fails ? "; the job ends, as --on-lost-state fail says"
                : "; training begins again with what the program loads itself");
}

std::string stopped_text(int rank, Duration time) {
  return "rank " + std::to_string(rank) + " has been stopped for " + muster::describe(time) +
         " (SIGSTOP, or a debugger), and the others wait for it: it is ended and replaced";
}

}  // namespace muster::launch
