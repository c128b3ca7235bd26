// SPDX-License-Identifier: BSD-3-Clause
/// The machines of `muster run --hosts` and `--hostfile`.
///
/// `hosts/` holds the launcher of launchers: the list of machines (here), what each is told
/// (`node_order.h`), and the processes of ssh that start `muster run` there (`remote_nodes.h`).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/status.h"

namespace muster::launch {

/// A machine, and so a node of the job.
struct JobHost {
  std::string destination;     ///< for ssh: "node1", "me@node1", "fe80::1"
  std::optional<int> workers;  ///< absent: as --nproc-per-node says

  /// The destination without the user.
  std::string name() const { return destination.substr(destination.find('@') + 1); }
};

/// "a,b:4,me@c,[::1]:2": names and numbers of workers, separated by commas. As for mpirun, a name
/// that stands there n times without a number has n workers.
Result<std::vector<JobHost>> parse_hosts(const std::string& text);

/// The same, one machine a line; also "node1 slots=4" (Open MPI's), and "#" begins a comment.
/// Errors give the line. `file` is for messages.
Result<std::vector<JobHost>> parse_host_lines(const std::string& text, const std::string& file);
Result<std::vector<JobHost>> read_host_file(const std::string& file);

}  // namespace muster::launch
