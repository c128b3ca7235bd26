// SPDX-License-Identifier: BSD-3-Clause
// muster.elastic's C++ half: epochs and commits. The objects of a state are Python's
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
#include "jobs/elastic/state_commits.h"

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

constexpr elastic::StateRefusals kRefusals{
    .no_commit = "elastic.State.restore: there is no commit yet",
    .nothing_bound =
        "elastic.State.commit: commits before this one have sharded parts, and nothing sharded is "
        "bound now; make the elastic.ShardedState in every call of the function",
    .not_restored =
        "elastic.State.commit: an elastic.ShardedState is bound that has not been restored; call "
        "its restore() also in the first epoch",
    .bound_already =
        "elastic.ShardedState: the State has one already in this epoch; give everything sharded to "
        "that one"};

/// The base of Python's State. Calls methods of that and of its `_shards`.
class PythonState final : public elastic::StateObjects {
 public:
  elastic::StateCommits commits{*this, kRefusals};

  elastic::AlikeContents contents() override {
    const py::gil_scoped_acquire held;
    using Parted = std::pair<std::string, std::vector<at::Tensor>>;
    elastic::AlikeContents contents;
    std::tie(contents.rest, contents.tensors) = self().attr("_contents")().cast<Parted>();
    for (std::size_t i = 0; i < contents.tensors.size(); ++i)
      contents.names.push_back("elastic.State." + std::to_string(i));
    return contents;
  }
  void put_back(const elastic::AlikeContents& from) override {
    const py::gil_scoped_acquire held;
    self().attr("_put_back")(py::bytes(from.rest), from.tensors);
  }
  void reseed(std::int64_t commit, int rank) override {
    const py::gil_scoped_acquire held;
    self().attr("_reseed")(commit, rank);
  }
  elastic::ShardedContents sharded_contents() override {
    const py::gil_scoped_acquire held;
    auto [items, values] = shards().attr("_contents")().cast<std::pair<Items, std::string>>();
    return {std::move(items.all), std::move(values)};
  }
  std::vector<checkpoint::CheckpointItem> wanted_shards(const shards::Index& index) override {
    const py::gil_scoped_acquire held;
    return shards().attr("_wanted")(index).cast<Items>().all;
  }
  void put_back_sharded() override {
    const py::gil_scoped_acquire held;
    shards().attr("_put_back")();
  }

 private:
  py::object self() const { return py::cast(this, py::return_value_policy::reference); }
  py::object shards() const { return self().attr("_shards"); }
};

void bind_state(py::module_& module) {
  const auto collective = [](auto method) {
    return [method](PythonState& self) {
      return blocking(nullptr, [&] { return (self.commits.*method)(); });
    };
  };
  const auto here = [](auto method) {
    return [method](PythonState& self) {
      const py::gil_scoped_release released;
      return (self.commits.*method)();
    };
  };
  using elastic::StateCommits;
  py::class_<PythonState>(module, "_ElasticState")
      .def(py::init())
      .def_property_readonly(
          "commits", [](const PythonState& self) { return self.commits.number(); },
          "Number of commits of the job so far, the state at the beginning included; 0: none.")
      .def("_commit", collective(&StateCommits::commit),
           "Collective; whether this process is to leave.")
      .def("restore", here(&StateCommits::restore),
           "Puts everything back to the last commit, and drops the gradients of the modules.")
      .def("_from_survivors", collective(&StateCommits::from_survivors),
           "Collective: each rank gets the last commit of the ranks that have any, else rank 0's "
           "state.")
      .def("_agree_on_end", collective(&StateCommits::agree_on_end),
           "Collective: all ranks have come to the end of training.")
      .def("_before_leaving", here(&StateCommits::before_leaving))
      .def("_bind", here(&StateCommits::bind), "Something sharded is part of it until `_unbind`.")
      .def("_unbind", here(&StateCommits::unbind))
      .def("_restore_sharded", collective(&StateCommits::restore_sharded), "Collective.");
}

}  // namespace

void bind_elastic(py::module_& module) {
  keep_launcher_socket_from_programs();
  bind_state(module);
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
      "_elastic_epoch_is_over",
      [](const std::string& code, std::vector<int> ranks, const std::string& text) {
        return EpochFollower::of_process().epoch_is_over(
            Status(code_of(code), text, std::move(ranks)));
      },
      py::arg("code"), py::arg("ranks"), py::arg("text"), py::call_guard<py::gil_scoped_release>(),
      "Whether an exception is the end of an epoch, which the launcher hears of; `code` and "
      "`ranks` "
      "are a DistError's, of others empty.");
  module.def(
      "_elastic_drop_group", [] { EpochFollower::of_process().drop_group(); },
      py::call_guard<py::gil_scoped_release>(),
      "Ends the default group without waiting for others.");
  module.def(
      "_elastic_note_ending", [] { EpochFollower::of_process().note_ending(); },
      py::call_guard<py::gil_scoped_release>(),
      "Tells the launcher that an exception leaves `run`, so that this process is about to end.");
  module.def(
      "_elastic_end_group",
      [](bool preempted) {
        EpochFollower::of_process().end_group(preempted ? elastic::RunOutcome::preempted
                                                        : elastic::RunOutcome::finished);
      },
      py::arg("preempted"), py::call_guard<py::gil_scoped_release>(),
      "Ends the default group once `train` has returned; in good order unless other nodes go on.");
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
