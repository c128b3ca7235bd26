// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/binding.h"

#include <algorithm>
#include <memory>

#if MUSTER_HWLOC
#include <hwloc.h>
#endif

namespace muster::cli {

#if MUSTER_HWLOC
namespace {

class HwlocMachine {
 public:
  static Result<std::shared_ptr<HwlocMachine>> load(const std::string& synthetic) {
    const std::shared_ptr<HwlocMachine> machine(new HwlocMachine);
    bool loaded = ::hwloc_topology_init(&machine->topology_) == 0;
    if (loaded && !synthetic.empty())
      loaded = ::hwloc_topology_set_synthetic(machine->topology_, synthetic.c_str()) == 0;
    else if (loaded)
      loaded = ::hwloc_topology_set_flags(machine->topology_,
                                          HWLOC_TOPOLOGY_FLAG_IS_THISSYSTEM |
                                              HWLOC_TOPOLOGY_FLAG_RESTRICT_TO_CPUBINDING) == 0;
    if (!loaded || ::hwloc_topology_load(machine->topology_) != 0)
      return Status(Code::unsupported, "--bind-to: hwloc finds nothing out about this machine");
    return machine;
  }
  HwlocMachine(const HwlocMachine&) = delete;
  ~HwlocMachine() {
    if (topology_ != nullptr) ::hwloc_topology_destroy(topology_);
  }

  /// Hardware threads of each, in hwloc's order, in which neighbours share most.
  std::vector<std::vector<int>> threads_of_all(hwloc_obj_type_t type) const {
    std::vector<std::vector<int>> all;
    for (hwloc_obj_t each = nullptr;
         (each = ::hwloc_get_next_obj_by_type(topology_, type, each)) != nullptr;) {
      std::vector<int> threads;
      for (int at = ::hwloc_bitmap_first(each->cpuset); at >= 0;
           at = ::hwloc_bitmap_next(each->cpuset, at))
        threads.push_back(at);
      if (!threads.empty()) all.push_back(std::move(threads));  // a NUMA node may be memory alone
    }
    return all;
  }

 private:
  HwlocMachine() = default;
  hwloc_topology_t topology_ = nullptr;
};

/// The first of the `part`-th of so many parts of `size`.
std::size_t first_of(std::size_t part, std::size_t parts, std::size_t size) {
  return part * size / parts;
}

std::vector<launch::WorkerCpus> bind_to_cores(const std::vector<std::vector<int>>& cores,
                                              std::size_t workers) {
  std::vector<launch::WorkerCpus> bound(workers);
  for (std::size_t worker = 0; worker < workers; ++worker) {
    const std::size_t begin = first_of(worker, workers, cores.size()),
                      end = first_of(worker + 1, workers, cores.size());
    for (std::size_t at = begin; at < end; ++at)
      bound[worker].threads.insert(bound[worker].threads.end(), cores[at].begin(), cores[at].end());
    bound[worker].cores = static_cast<int>(end - begin);
    std::sort(bound[worker].threads.begin(), bound[worker].threads.end());
  }
  return bound;
}

std::vector<launch::WorkerCpus> bind_to_nodes(const std::vector<std::vector<int>>& nodes,
                                              const std::vector<std::vector<int>>& cores,
                                              std::size_t workers) {
  const auto node_of = [&](std::size_t worker) { return first_of(worker, workers, nodes.size()); };
  std::vector<std::size_t> users(nodes.size());
  for (std::size_t worker = 0; worker < workers; ++worker) ++users[node_of(worker)];
  std::vector<launch::WorkerCpus> bound;
  for (std::size_t worker = 0; worker < workers; ++worker) {
    const std::vector<int>& node = nodes[node_of(worker)];
    const auto inside = std::count_if(cores.begin(), cores.end(), [&](const auto& core) {
      return std::binary_search(node.begin(), node.end(), core.front());
    });
    const auto share = static_cast<int>(inside) / static_cast<int>(users[node_of(worker)]);
    bound.push_back({node, std::max(1, share)});
  }
  return bound;
}

}  // namespace

Result<std::vector<launch::WorkerCpus>> bind_workers(const std::string& to, int workers,
                                                     const std::string& synthetic) {
  if (to == "none") return std::vector<launch::WorkerCpus>();
  if (to != "core" && to != "numa")
    return Status(Code::invalid_argument, "--bind-to: \"" + to + "\" is none of core, numa, none");
  const auto machine = HwlocMachine::load(synthetic);
  if (!machine) return machine.status();
  auto cores = (*machine)->threads_of_all(HWLOC_OBJ_CORE);
  if (cores.empty()) cores = (*machine)->threads_of_all(HWLOC_OBJ_PU);
  const auto count = static_cast<std::size_t>(workers);
  if (to == "core" && cores.size() < count)
    return Status(Code::invalid_argument, "--bind-to core: there are " + std::to_string(workers) +
                                              " workers, and only " + std::to_string(cores.size()) +
                                              " cores may be used; start fewer, or say none");
  if (to == "core") return bind_to_cores(cores, count);
  const auto nodes = (*machine)->threads_of_all(HWLOC_OBJ_NUMANODE);
  if (nodes.empty())
    return Status(Code::unsupported, "--bind-to numa: hwloc finds no NUMA node with processors");
  return bind_to_nodes(nodes, cores, count);
}
#else
Result<std::vector<launch::WorkerCpus>> bind_workers(const std::string& to, int,
                                                     const std::string&) {
  if (to == "none") return std::vector<launch::WorkerCpus>();
  return Status(Code::unsupported,
                "--bind-to: this muster was built without hwloc; install it (Debian's "
                "libhwloc-dev) and build again");
}
#endif

Result<std::string> binding_of(const std::string& bind_to, const std::string& numa_binding) {
  const std::string name = "--numa-binding";
  if (numa_binding.empty()) return bind_to;
  if (bind_to != "none")
    return Status(Code::invalid_argument, name + " and --bind-to exclude each other");
  if (numa_binding == "node") return std::string("numa");
  if (numa_binding == "exclusive") return std::string("core");
  if (numa_binding == "socket" || numa_binding == "core-complex")
    return Status(Code::unsupported, name + " " + numa_binding +
                                         " of torchrun is not supported; there are node and "
                                         "exclusive (--bind-to numa and core)");
  return Status(Code::invalid_argument, name + ": \"" + numa_binding +
                                            "\" is none of torchrun's node, socket, exclusive and "
                                            "core-complex");
}

}  // namespace muster::cli
