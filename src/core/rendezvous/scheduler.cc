// SPDX-License-Identifier: BSD-3-Clause
#include "core/rendezvous/scheduler.h"

#include <unistd.h>

#include <charconv>
#include <cstdint>

#include "core/base/hash.h"
#include "core/base/process/limits.h"
#include "core/base/process/process_start.h"

namespace muster {
namespace {

using Job = std::string (*)(const VariableOf&);

struct Dialect {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  const char* node;
  Job job;
};

std::optional<int> number(const VariableOf& variable, const char* name) {
  const auto text = *name == '\0' ? std::nullopt : variable(name);
  int value = 0;
  if (!text) return {};
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  return error == std::errc() && stop == end && value >= 0 ? std::optional(value) : std::nullopt;
}

std::string job_of_slurm(const VariableOf& variable) {
  const auto job = variable("SLURM_JOB_ID"), step = variable("SLURM_STEP_ID");
  return job && step ? "slurm " + *job + "." + *step : std::string();
}

std::string job_of_pmix(const VariableOf& variable) {
  const auto job = variable("PMIX_NAMESPACE");
  return job ? "pmix " + *job : std::string();
}

/// Hydra, the launcher of MPICH and its kin, tells ranks no name of their job; but all of a host
/// descend from one process of it. If there is no such process, srun has started them and speaks
/// PMI.
std::string job_of_pmi(const VariableOf& variable) {
  for (pid_t process = ::getppid(); process > 1;) {
    const auto stat =
        small_file("/proc/" + std::to_string(process) + "/stat");  // number (name) state parent ...
    const auto open = stat ? stat->find('(') : std::string::npos,
               close = stat ? stat->rfind(')') : std::string::npos;
    if (open == std::string::npos || close == std::string::npos || close + 4 > stat->size()) break;
    if (stat->substr(open + 1, close - open - 1) == "hydra_pmi_proxy") {
      const auto start = process_start(process);
      return start ? "hydra " + std::to_string(process) + " " + std::to_string(*start)
                   : std::string();
    }
    pid_t parent = 0;
    std::from_chars(stat->data() + close + 4, stat->data() + stat->size(), parent);
    process = parent;
  }
  return job_of_slurm(variable);
}

/// The pods of an Indexed Job or of a JobSet's job have one name but for the number at its end.
std::string first_pod(const VariableOf& variable) {
  const std::string index = variable("JOB_COMPLETION_INDEX").value_or("");
  const std::string pod = variable("HOSTNAME").value_or("");
  const std::string end = "-" + index;
  if (index.empty() || !pod.ends_with(end) || pod.size() == end.size()) return {};
  return pod.substr(0, pod.size() - index.size()) + "0";
}

std::string job_of_kubernetes(const VariableOf& variable) {
  const std::string pod = first_pod(variable);
  return pod.empty() ? pod : "kubernetes " + pod;
}

constexpr Dialect kDialects[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "", job_of_pmix},
    {"MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", "", job_of_pmi},
    {"MPICH (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", job_of_pmi},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
     "SLURM_NODEID", job_of_slurm},
    {"Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "", "", "", job_of_kubernetes},
};

/// Below the ports that the system gives out by itself, and above those of services; another one
/// for every step of every job, also those of an array.
std::uint16_t port_of(const std::string& job) {
  constexpr std::uint32_t kFirst = 20000, kCount = 10000;
  return static_cast<std::uint16_t>(kFirst + hash_of(job) % kCount);
}

constexpr std::uint16_t kUsualPort = 29500;  // torch.distributed's

std::optional<std::vector<std::string>> slurm_nodes(const VariableOf& variable) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (const auto text = variable(name)) return expand_node_list(*text);
  }
  return std::nullopt;
}

/// How many tasks of the step are on each of its nodes.
std::optional<std::vector<int>> slurm_tasks(const VariableOf& variable) {
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (const auto text = variable(name)) return expand_tasks_per_node(*text);
  }
  return std::nullopt;
}

void add_slurm(SchedulerRanks& found, const VariableOf& variable) {
  if (const auto nodes = slurm_nodes(variable)) found.master = nodes->front();
  if (!found.job.empty()) found.port = port_of(found.job);
  const auto tasks = slurm_tasks(variable);
  if (tasks && found.node && static_cast<std::size_t>(*found.node) < tasks->size())
    found.local_world_size = (*tasks)[static_cast<std::size_t>(*found.node)];
}

bool is_batch_script(const VariableOf& variable) {
  return variable("SLURM_JOB_ID") && !variable("SLURM_STEP_ID") && !variable("SLURM_STEPID");
}

/// Slurm's size is the step's: what an allocation's interactive shell runs is a step of one task.
std::optional<int> world_size_of(const Dialect& dialect, const VariableOf& variable) {
  if (dialect.job == job_of_slurm) {
    if (const auto step = number(variable, "SLURM_STEP_NUM_TASKS")) return step;
  }
  return number(variable, dialect.world_size);
}

/// Slurm's tasks per node are a limit that srun may stay below, and say nothing of where ranks are.
bool is_one_host(const Dialect& dialect, const SchedulerRanks& found, const VariableOf& variable) {
  if (dialect.job != job_of_slurm && found.local_world_size)
    return found.local_world_size == found.world_size;
  const auto step = number(variable, "SLURM_STEP_NUM_NODES");
  return (step ? step : number(variable, "SLURM_NNODES")) == 1;
}

}  // namespace

std::optional<SchedulerRanks> detect_scheduler(const VariableOf& variable) {
  for (const Dialect& dialect : kDialects) {
    const auto rank = number(variable, dialect.rank), world_size = world_size_of(dialect, variable);
    if (!rank || !world_size || *rank >= *world_size) continue;
    if (dialect.job == job_of_slurm && is_batch_script(variable)) continue;
    SchedulerRanks found;
    found.name = dialect.name;
    found.rank = *rank;
    found.world_size = *world_size;
    found.local_rank = number(variable, dialect.local_rank);
    found.local_world_size = number(variable, dialect.local_world_size);
    found.node = number(variable, dialect.node);
    found.one_host = is_one_host(dialect, found, variable);
    found.job = dialect.job(variable);
    if (dialect.job == job_of_slurm) add_slurm(found, variable);
    if (dialect.job == job_of_kubernetes) {
      found.master = first_pod(variable);
      found.master_shares_domain = true;
      found.port = kUsualPort;
    }
    if (variable("PMI_FD") && dialect.job == job_of_pmi)
      found.exchange = SchedulerRanks::AddressExchange::pmi;
    else if (variable("PMIX_NAMESPACE"))
      found.exchange = SchedulerRanks::AddressExchange::pmix;
    return found;
  }
  return {};
}

std::optional<SchedulerNode> detect_node(const VariableOf& variable) {
  if (variable("SLURM_PROCID") && !is_batch_script(variable)) {
    const auto node = number(variable, "SLURM_NODEID");
    auto nodes = number(variable, "SLURM_STEP_NUM_NODES");
    if (!nodes) nodes = number(variable, "SLURM_NNODES");
    if (node && nodes && *node < *nodes) {
      SchedulerNode found{.name = "Slurm",
                          .nodes = nodes,
                          .node_rank = *node,
                          .master = {},
                          .port = port_of(job_of_slurm(variable))};
      if (const auto names = slurm_nodes(variable)) found.master = names->front();
      const auto tasks = slurm_tasks(variable);
      if (tasks && static_cast<std::size_t>(*node) < tasks->size())
        found.tasks_on_node = (*tasks)[static_cast<std::size_t>(*node)];
      return found;
    }
  }
  if (const auto index = number(variable, "JOB_COMPLETION_INDEX")) {
    return SchedulerNode{.name = "Kubernetes",
                         .nodes = {},
                         .node_rank = *index,
                         .master = first_pod(variable),
                         .master_shares_domain = true,
                         .port = kUsualPort};
  }
  return std::nullopt;
}

namespace {

constexpr std::size_t kMost = 1'000'000;  // limit: a list that is a mistake

std::optional<std::uint64_t> whole(std::string_view digits) {
  std::uint64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (digits.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

/// The numbers of "1-3,07", as they are written.
bool expand_numbers(std::string_view text, std::vector<std::string>& out) {
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    const std::size_t dash = item.find('-');
    const std::string_view low = item.substr(0, dash);
    const auto first = whole(low);
    const auto last = dash == std::string_view::npos ? first : whole(item.substr(dash + 1));
    if (!first || !last || *last < *first || *last - *first >= kMost - out.size()) return false;
    for (std::uint64_t number = *first; number <= *last; ++number) {
      std::string digits = std::to_string(number);
      if (digits.size() < low.size()) digits.insert(0, low.size() - digits.size(), '0');
      out.push_back(std::move(digits));
    }
    if (comma == std::string_view::npos) return true;
    text.remove_prefix(comma + 1);
  }
}

/// One name with any number of brackets.
bool expand_name(std::string_view text, std::vector<std::string>& out) {
  std::vector<std::string> names{""};
  while (!text.empty()) {
    const std::size_t open = text.find('[');
    for (std::string& name : names) name += text.substr(0, open);
    if (open == std::string_view::npos) break;
    const std::size_t close = text.find(']', open);
    std::vector<std::string> numbers;
    if (close == std::string_view::npos ||
        !expand_numbers(text.substr(open + 1, close - open - 1), numbers) ||
        numbers.size() * names.size() > kMost)
      return false;
    std::vector<std::string> longer;
    for (const std::string& name : names)
      for (const std::string& number : numbers) longer.push_back(name + number);
    names = std::move(longer);
    text.remove_prefix(close + 1);
  }
  for (std::string& name : names) {
    if (name.empty() || name.find(']') != std::string::npos) return false;
    out.push_back(std::move(name));
  }
  return out.size() <= kMost;
}

}  // namespace

std::optional<std::vector<std::string>> expand_node_list(std::string_view text) {
  std::vector<std::string> names;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t at = 0; at <= text.size(); ++at) {
    if (at < text.size() && text[at] == '[') ++depth;
    if (at < text.size() && text[at] == ']') --depth;
    if (depth < 0 || depth > 1) return std::nullopt;
    if (at < text.size() && (text[at] != ',' || depth > 0)) continue;
    if (!expand_name(text.substr(begin, at - begin), names)) return std::nullopt;
    begin = at + 1;
  }
  if (names.empty() || depth != 0) return std::nullopt;
  return names;
}

std::optional<std::vector<int>> expand_tasks_per_node(std::string_view text) {
  std::vector<int> tasks;
  while (true) {
    const std::size_t comma = text.find(',');
    std::string_view item = text.substr(0, comma);
    std::uint64_t times = 1;
    if (const std::size_t open = item.find("(x"); open != std::string_view::npos) {
      const auto repeated =
          item.ends_with(')') ? whole(item.substr(open + 2, item.size() - open - 3)) : std::nullopt;
      if (!repeated) return std::nullopt;
      times = *repeated;
      item = item.substr(0, open);
    }
    const auto count = whole(item);
    if (!count || *count > kMost || times > kMost - tasks.size()) return std::nullopt;
    tasks.insert(tasks.end(), times, static_cast<int>(*count));
    if (comma == std::string_view::npos) return tasks;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace muster
