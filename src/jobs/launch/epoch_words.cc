// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/epoch_words.h"

#include <utility>

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

std::string restart_text(const membership::Epoch& epoch, int max_restarts, bool keep) {
  const std::size_t nodes = epoch.members.size();
  if (keep)
    return epoch.reason + "; starting all workers of this node" +
           (nodes == 1 ? "" : ", and other nodes keep those that live") +
           number_text(epoch, max_restarts);
  return epoch.reason + "; starting all workers again on " + std::to_string(nodes) +
         (nodes == 1 ? " node" : " nodes") + number_text(epoch, max_restarts);
}

std::string start_text(const membership::Epoch& epoch, const RunOptions& options,
                       std::int64_t before, bool keep) {
  if (before > 0) return restart_text(epoch, options.max_restarts, keep);
  const bool joins = epoch.number > 1;
  if (joins || std::cmp_greater_equal(epoch.members.size(), options.nodes)) return {};
  return epoch.reason + "; beginning on " + std::to_string(epoch.members.size()) + " of at most " +
         std::to_string(options.nodes) + " nodes";
}

std::string waiting_text(const RunOptions& options) {
  if (!is_elastic(options) || options.last_call <= Duration::zero()) return {};
  return "waiting for more nodes: the job begins when " + std::to_string(options.nodes) +
         " nodes have come, or " + muster::describe(options.last_call) +
         " after the last one if at least " + std::to_string(least_nodes(options)) +
         (least_nodes(options) == 1 ? " has" : " have");
}

std::string loss_text(std::int64_t epoch, const NodeWorkers::LostCommits& lost, bool fails) {
  const std::string made = std::to_string(lost.made), kept = std::to_string(lost.kept);
  const std::string end = "; the job ends, as --on-lost-state fail says";
  if (lost.kept > 0 && lost.made <= lost.kept)
    return "commits of the job may be lost: no rank of epoch " + std::to_string(epoch) +
           " knows whether others made any after commit " + kept +
           (fails ? end : "; training goes on from that one");
  if (lost.kept > 0)
    return "commits of the job are lost: of the " + made +
           " or more that were made before no rank of epoch " + std::to_string(epoch) +
           " has one after commit " + kept + (fails ? end : "; training goes on from that one");
  return "the state of the job is lost: no rank of epoch " + std::to_string(epoch) +
         " has any of the " + made + (lost.made == 1 ? " commit" : " commits") +
         " or more that were made before" +
         (fails ? end : "; training begins again with what the program loads itself");
}

WorkerNotice leave_notice(std::int64_t epoch, int signal) {
  WorkerNotice notice;
  notice.kind = WorkerNoticeKind::leave;
  notice.epoch = epoch;
  notice.reason = "the launcher got " + signal_name(signal);
  return notice;
}

std::string leaving_text(int signal, Duration grace, bool goes_on) {
  return "got " + signal_name(signal) +
         ": the workers here leave after their next commit, for which they have " +
         muster::describe(grace) + "; then " +
         (goes_on ? "this node leaves, and the job goes on without it if enough others are left"
                  : "the job ends");
}

WorkerNotice repair_notice(const membership::Epoch& epoch) {
  WorkerNotice notice;
  notice.epoch = epoch.number;
  notice.restarts = epoch.restarts;
  notice.state_in = epoch.state_in;
  notice.reason = epoch.reason;
  return notice;
}

std::string left_out_text(std::int64_t epoch) {
  return "the job has gone on without this node (as of epoch " + std::to_string(epoch) +
         "): the workers here are ended, and start again once this node has a place";
}

std::string given_up_text(Duration time) {
  return "the last commit of the workers here ends with them: they have not given it to their "
         "launcher within " +
         muster::describe(time);
}

std::string stopped_text(int rank, Duration time) {
  return "rank " + std::to_string(rank) + " has been stopped for " + muster::describe(time) +
         " (SIGSTOP, or a debugger), and the others wait for it: it is ended and replaced";
}

}  // namespace muster::launch
