// SPDX-License-Identifier: BSD-3-Clause
/// The launcher of `muster run --hosts`: one process of ssh for each machine, on which `muster
/// node` does what `muster run` does there.
#pragma once

#include <string>
#include <vector>

#include "jobs/launch/hosts/node_order.h"
#include "jobs/launch/options.h"
#include "jobs/launch/workers/process.h"
#include "muster/clock.h"

namespace muster::launch {

struct RemoteNode {
  std::string destination;  ///< for ssh
  NodeOrder order;
};

struct RemoteOptions {
  std::string command = "muster run";      ///< the command's name in messages
  std::vector<std::string> ssh = {"ssh"};  ///< the program and its options
  std::string muster;                      ///< its path on the machines
  Duration connect_timeout = std::chrono::seconds(30);
  /// How long the other nodes may take to end once one has ended with an error, or a signal has
  /// come: some more than their launchers need.
  Duration ending_timeout = std::chrono::seconds(15);
  std::set<int> stop_signals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
};

/// The words of the process that starts a node.
std::vector<std::string> ssh_words(const RemoteOptions& options, const std::string& destination);

/// Whether ssh itself has failed, or was ended: it exits with 255 where it cannot connect, or loses
/// the connection. A node whose program ends with 255 cannot be told from that.
inline bool is_lost(const ProcessExit& exit) { return exit.signal != 0 || exit.code == 255; }

/// Whether a node may have ended before it came to the job: options that are wrong there, or a
/// program, folder or muster that is not there.
inline bool could_not_start(const ProcessExit& exit) {
  return exit.code == 2 || exit.code == 126 || exit.code == 127;
}

/// Starts all nodes, shows their output as it comes and passes signals on. The first node that ends
/// with an error ends the others: they hear of it by the job's own means, or are told if it may not
/// have come to the job, or its connection is lost. Nodes that have not ended in time lose their
/// ssh, and end for that. The exit code: 0 if all nodes succeeded, 128 + signal if one has stopped
/// this launcher, else that of the node that failed first (255 if its connection failed). Call it
/// as `run_job`.
int run_remote_nodes(const RemoteOptions& options, const std::vector<RemoteNode>& nodes);

}  // namespace muster::launch
