// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <algorithm>

namespace muster::cli {

const std::vector<CommandRow>& command_rows() {
  static const std::vector<CommandRow> rows = {
      {"run", "Start a job", "start the ranks of a job on this node, as torchrun does",
       run_command},
      {"launch", "Start a job", "the same with torch.distributed.launch's options", launch_command},
      {"secret", "Start a job", "a secret for a job of several nodes", secret_command},
      {"top", "Look at a job", "what a job's ranks are in, refreshed", top_command},
      {"dash", "Look at a job", "a page of a job's ranks for a browser, live and after the end",
       dash_command},
      {"trace", "Look at a job",
       "what a job's ranks called last, live or dead, who is behind, and a timeline",
       trace_command},
      {"checkpoint", "Look at a job",
       "sharded checkpoints: what is there, whether it is whole, and other forms of it",
       checkpoint_command},
      {"doctor", "Look at a machine",
       "what this machine offers to a job, and what is in the way of one", doctor_command},
      {"bench", "Look at a machine", "how long collectives take between processes of this machine",
       bench_command},
      {"tunables", "Settings", "the performance numbers in force, and what overrides them",
       tunables_command},
      {"environment", "Settings", "the environment variables that muster reads",
       environment_command},
      {"completion", "Settings", "completion of commands and options for bash, zsh and fish",
       completion_command},
      {"man-pages", "", "the manual pages of all commands", man_pages_command},
      {"node", "", "a node of a job of muster run --hosts", node_command},
      {"bench-worker", "", "the ranks that muster bench measures", bench_worker_command},
  };
  return rows;
}

const CommandRow* find_command(const std::string& name) {
  const auto& rows = command_rows();
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const CommandRow& row) { return row.name == name; });
  return found == rows.end() ? nullptr : &*found;
}

}  // namespace muster::cli
