// muster.elastic's C++ half: epochs and agreements. The state itself is Python's
// (python/muster/elastic.py).
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "blocking.h"
#include "checkpoint_items.h"
#include "core/base/process/launcher_socket.h"
#include "jobs/elastic/epoch_follower.h"
#include "jobs/elastic/memory_commits.h"
#include "jobs/elastic/state_sync.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using elastic::EpochFollower;

/// The variables that the launcher would have set in this epoch.
std::map<std::string, std::string> variables(const launch::WorkerNotice& news) {
  const launch::WorkerRanks& ranks = news.ranks;
  return {{"RANK", std::to_string(ranks.rank)},
          {"WORLD_SIZE", std::to_string(ranks.world_size)},
          {"LOCAL_RANK", std::to_string(ranks.local_rank)},
          {"LOCAL_WORLD_SIZE", std::to_string(ranks.local_world_size)},
          {"GROUP_RANK", std::to_string(ranks.group_rank)},
          {"GROUP_WORLD_SIZE", std::to_string(ranks.group_world_size)},
          {"ROLE_RANK", std::to_string(ranks.role_rank)},
          {"ROLE_WORLD_SIZE", std::to_string(ranks.role_world_size)},
          {"MASTER_ADDR", news.master_addr},
          {"MASTER_PORT", std::to_string(news.master_port)},
          {"MUSTER_AGENT_STORE", news.agent_store},
          {"TORCHELASTIC_RESTART_COUNT", std::to_string(news.restarts)},
          {"MUSTER_EPOCH", std::to_string(news.epoch)}};
}

/// The commits of sharded states. Collective calls are on the default group.
void bind_memory(py::module_& module) {
  using elastic::FoundCommit;
  using elastic::MemoryCommits;
  py::class_<FoundCommit>(module, "_ElasticCommit")
      .def_property_readonly("number", [](const FoundCommit& self) { return self.id.number; })
      .def_property_readonly("values",
                             [](const FoundCommit& self) { return py::bytes(self.values); })
      .def_property_readonly(
          "tensors",
          [](const FoundCommit& self) {
            std::map<std::string, std::pair<std::string, shards::Extent>> all;
            for (const auto& [name, tensor] : self.index.tensors)
              all[name] = {tensor.dtype, tensor.sizes};
            return all;
          },
          "Type, by its name in a checkpoint, and sizes of each tensor.");
  py::class_<MemoryCommits>(module, "_ElasticMemory")
      .def(py::init())
      .def(
          "adopt",
          [](MemoryCommits& self) { self.adopt(EpochFollower::of_process().take_memories()); },
          py::call_guard<py::gil_scoped_release>(),
          "Takes what the launcher has held for this process's place.")
      .def("has_any", &MemoryCommits::has_any)
      .def(
          "find",
          [](MemoryCommits& self) { return blocking(nullptr, [&] { return self.find(); }); },
          "Collective: the newest commit that the job has. Raises DistError where that is lost.")
      .def("has_last", &MemoryCommits::has_last)
      .def("last", &MemoryCommits::last)
      .def(
          "fill",
          [](const MemoryCommits& self, const FoundCommit& commit, const Items& items) {
            blocking(nullptr, [&] { self.fill(commit, items.all); });
          },
          py::arg("commit"), py::arg("items"), "Collective.")
      .def(
          "fill_here",
          [](const MemoryCommits& self, const FoundCommit& commit, const Items& items) {
            self.fill_here(commit, items.all);
          },
          py::arg("commit"), py::arg("items"), "From what `last` has given; not collective.")
      .def(
          "begin_epoch",
          [](MemoryCommits& self, const FoundCommit* restored) {
            const EpochFollower& follower = EpochFollower::of_process();
            std::optional<elastic::CommitId> id;
            if (restored != nullptr) id = restored->id;
            blocking(nullptr, [&] { self.begin_epoch(follower.epoch(), follower.node(), id); });
          },
          py::arg("restored"), "Collective.")
      .def(
          "write",
          [](MemoryCommits& self, std::int64_t number, const Items& items, const py::bytes& values,
             std::size_t alike) {
            const elastic::CommitContents contents{items.all, values, alike};
            blocking(nullptr, [&] { self.write(number, contents); });
          },
          py::arg("number"), py::arg("items"), py::arg("values"), py::arg("alike"),
          "Collective: writes this rank's part; the first `alike` items all ranks have alike.")
      .def("agreed", &MemoryCommits::agreed);
}

}  // namespace

void bind_elastic(py::module_& module) {
  keep_launcher_socket_from_programs();
  bind_memory(module);
  module.def(
      "_elastic_join",
      [](std::optional<std::string> backend, std::optional<Duration> timeout,
         Duration repair_timeout) -> std::optional<std::map<std::string, std::string>> {
        watch_for_interrupts();
        elastic::ElasticOptions options;
        options.group.backend = std::move(backend);
        options.group.timeout = timeout;
        options.repair_timeout = repair_timeout;
        std::optional<launch::WorkerNotice> news;
        const bool joined = blocking_on_store([&] {
          EpochFollower& follower = EpochFollower::of_process();
          if (!follower.join(options, nullptr)) return false;
          news = follower.entered();
          return true;
        });
        if (!joined) return std::nullopt;
        using Variables = std::map<std::string, std::string>;
        return news ? variables(*news) : Variables();
      },
      py::arg("backend"), py::arg("timeout"), py::arg("repair_timeout"),
      "Makes the default group of the next epoch of the job; gives the variables that differ from "
      "the environment's, None where this process is to leave. Raises DistError where no epoch "
      "comes within repair_timeout.");
  module.def(
      "_elastic_epoch_is_over", [] { return EpochFollower::of_process().epoch_is_over(nullptr); },
      py::call_guard<py::gil_scoped_release>(),
      "Whether the default group failed because a rank ended, or another epoch is announced.");
  module.def(
      "_elastic_drop_group", [] { EpochFollower::of_process().drop_group(); },
      py::call_guard<py::gil_scoped_release>(),
      "Ends the default group without waiting for others.");
  module.def(
      "_elastic_end_group",
      [](bool preempted) {
        EpochFollower::of_process().end_group(preempted ? elastic::RunOutcome::preempted
                                                        : elastic::RunOutcome::finished);
      },
      py::arg("preempted"), py::call_guard<py::gil_scoped_release>(),
      "Ends the default group once `train` has returned; in good order unless other nodes go on.");
  module.def(
      "_elastic_agree",
      [](std::int64_t number, bool finished) {
        return blocking(nullptr, [&] {
          const EpochFollower& follower = EpochFollower::of_process();
          const bool own = !finished && follower.leaving();
          const bool any = elastic::agree_on_commit(number, own);
          return own || (any && follower.is_only_node());
        });
      },
      py::arg("number"), py::arg("finished"),
      "All ranks have come to commit `number`, or to the end; whether this one is to leave.");
  module.def(
      "_elastic_share_of_batch",
      [](std::int64_t global_batch, std::int64_t largest) {
        std::vector<std::tuple<std::int64_t, std::int64_t, double>> ranges;
        for (const auto& range : elastic::share_of_batch(global_batch, largest))
          ranges.emplace_back(range.first, range.count, range.weight);
        return ranges;
      },
      py::arg("global_batch"), py::arg("largest"),
      "First sample, number of samples and weight of each round of this rank.");
  module.def("_elastic_epoch", &elastic::epoch, py::call_guard<py::gil_scoped_release>(),
             "Number of this process's epoch; 0: of none.");
}

}  // namespace muster::python
