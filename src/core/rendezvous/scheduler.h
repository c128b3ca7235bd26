// SPDX-License-Identifier: BSD-3-Clause
/// Ranks given by other people's launchers: Slurm, MPI, PMI, Kubernetes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"

namespace muster {

struct SchedulerRanks {
  std::string name;  ///< "Slurm", "Open MPI", ...
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank, local_world_size, node;
  bool one_host = false;  ///< all ranks are known to be on this host
  std::string job;  ///< the same text on all ranks of this launch on this host, another for every
                    ///< launch; empty: not known

  /// Host of rank 0; empty: the environment does not say.
  std::string master;
  /// `master` is a pod's name, to which the domain of this pod's own full name belongs.
  bool master_shares_domain = false;
  /// The port that all ranks take where none is given; none: the environment has nothing to choose
  /// it by.
  std::optional<std::uint16_t> port;
  /// Ranks can tell each other something before they are connected: by PMI or PMIx.
  enum class AddressExchange : std::uint8_t { none, pmi, pmix };
  AddressExchange exchange = AddressExchange::none;

  /// Ranks that need to be told no address.
  bool can_meet_on_this_host() const { return one_host && !job.empty(); }
};

/// The text of a variable; none where it is unset or empty.
using VariableOf = std::function<std::optional<std::string>(const char* name)>;

/// Reads the environment of this process, from the first launcher whose variables are all there and
/// make sense. MPI's come before Slurm's, which stay set in what an allocation's shell runs. A
/// process that a batch script starts without srun is none of Slurm's ranks.
std::optional<SchedulerRanks> detect_scheduler(const VariableOf& variable = env_text);

/// The node of a `muster run` that something else has started once on every node.
struct SchedulerNode {
  std::string name;  ///< "Slurm", "Kubernetes"
  std::optional<int> nodes;
  int node_rank = 0;
  std::string master;  ///< host of node 0; empty: not known
  bool master_shares_domain = false;
  std::optional<std::uint16_t> port;
  int tasks_on_node = 1;  ///< how often it was started on this node
};
std::optional<SchedulerNode> detect_node(const VariableOf& variable = env_text);

// The lists that Slurm writes into its variables in a short form.

/// "n[1-3,07],login" is n1, n2, n3, n07, login; a number keeps its leading zeros, and several
/// brackets give every combination, the last one running fastest (SLURM_JOB_NODELIST; as
/// `scontrol show hostnames` has it). Nothing where the text is no such list or has more than a
/// million names.
std::optional<std::vector<std::string>> expand_node_list(std::string_view text);

/// "2(x3),1" is 2, 2, 2, 1: the tasks of each node (SLURM_TASKS_PER_NODE). Nothing where the text
/// is no such list.
std::optional<std::vector<int>> expand_tasks_per_node(std::string_view text);

}  // namespace muster
