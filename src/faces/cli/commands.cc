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
      {"top", "Look at a job", "what its ranks are in, refreshed", top_command},
      {"trace", "Look at a job",
       "what its ranks called last, live or dead, who is behind, and a timeline", trace_command},
      {"checkpoint", "Look at a job",
       "its checkpoints: what is there, whether it is whole, and other forms of it",
       checkpoint_command},
      {"doctor", "Look at a machine", "what it offers to a job, and what is in the way of one",
       doctor_command},
      {"bench", "Look at a machine", "how long collectives take between its processes",
       bench_command},
      {"tunables", "Look at a machine", "the performance numbers in force, and what overrides them",
       tunables_command},
      {"environment", "Look at a machine", "the environment variables that muster reads",
       environment_command},
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
