/// The lists that Slurm writes into its variables in a short form.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

/// "n[1-3,07],login" is n1, n2, n3, n07, login; a number keeps its leading zeros, and several
/// brackets give every combination, the last one running fastest (SLURM_JOB_NODELIST; as
/// `scontrol show hostnames` has it). Nothing where the text is no such list or has more than a
/// million names.
std::optional<std::vector<std::string>> expand_node_list(std::string_view text);

/// "2(x3),1" is 2, 2, 2, 1: the tasks of each node (SLURM_TASKS_PER_NODE). Nothing where the text
/// is no such list.
std::optional<std::vector<int>> expand_tasks_per_node(std::string_view text);

}  // namespace muster
