// SPDX-License-Identifier: BSD-3-Clause
// A node of a job that stock torchrun starts: muster's membership below the handler of
// python/muster/torch/rendezvous.py.
#include <pybind11/chrono.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/group/errors.h"
#include "jobs/launch/node/node_rendezvous.h"
#include "muster/store.h"
#include "no_gil.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using launch::EpochPlan;
using launch::RendezvousNode;
using membership::NodePhase;

/// News of the job, as the handler reads them.
struct RendezvousNews {
  std::string kind;
  std::int64_t epoch = 0;
  std::string text{};
  std::shared_ptr<const EpochPlan> plan{};

  bool has_seat() const { return plan && plan->node >= 0; }
  int rank() const { return has_seat() ? plan->node : -1; }
  int world_size() const { return plan ? static_cast<int>(plan->nodes.size()) : 0; }
  std::string master_addr() const { return plan ? plan->nodes.front().program_addr : ""; }
  int master_port() const { return plan ? plan->nodes.front().program_port : 0; }
  std::vector<std::string> nodes() const {
    std::vector<std::string> names;
    if (!plan) return names;
    for (const launch::NodeDetails& node : plan->nodes) names.push_back(node.launcher);
    return names;
  }
};

RendezvousNews end_of_job(const launch::JobEnded& end, bool service_lost) {
  const char* kind = service_lost                          ? "lost"
                     : end.succeeded || end.exit_code == 0 ? "closed"
                                                           : "failed";
  return {kind, 0, end.reason};
}

std::vector<RendezvousNews> described(std::vector<launch::NodeNotice> all) {
  std::vector<RendezvousNews> told;
  for (launch::NodeNotice& news : all) {
    if (news.complete > 0) told.push_back({"complete", news.complete});
    if (!news.event) continue;
    if (const auto* next = std::get_if<launch::NewEpoch>(&*news.event)) {
      const std::string reason = news.plan ? news.plan->epoch.reason : std::string();
      told.push_back({news.plan ? "epoch" : "displaced", next->number, reason, news.plan});
    } else if (const auto* end = std::get_if<launch::JobEnded>(&*news.event)) {
      told.push_back(end_of_job(*end, news.service_lost));
    } else if (std::holds_alternative<launch::OthersGone>(*news.event)) {
      told.push_back({"alone"});
    }
  }
  return told;
}

std::shared_ptr<RendezvousNode> open_node(const std::string& membership, std::string endpoint,
                                          std::string run_id, int min_nodes, int max_nodes,
                                          std::optional<std::string> local_addr,
                                          Duration join_timeout, Duration last_call,
                                          Duration repair_timeout,
                                          std::optional<Duration> keep_alive) {
  const auto kind = membership == "etcd"         ? launch::RendezvousKind::etcd
                    : membership == "kubernetes" ? launch::RendezvousKind::kubernetes
                                                 : launch::RendezvousKind::assigned_ranks;
  auto node = RendezvousNode::open({kind, std::move(endpoint), std::move(run_id), min_nodes,
                                    max_nodes, std::move(local_addr), join_timeout, last_call,
                                    repair_timeout, keep_alive});
  if (!node) group::raise_from_store(node.status());
  return std::move(node).value();
}

}  // namespace

void bind_torch_rendezvous(py::module_& module) {
  py::class_<RendezvousNews>(module, "_RendezvousNews",
                             "kind: epoch, displaced (the place in the job is lost), complete (all "
                             "nodes of the epoch have come), closed, failed, lost (the membership "
                             "service), alone (no other node is left).")
      .def_readonly("kind", &RendezvousNews::kind)
      .def_readonly("epoch", &RendezvousNews::epoch, "Its number; 0: of none.")
      .def_readonly("text", &RendezvousNews::text, "The reason, for people.")
      .def_property_readonly("rank", &RendezvousNews::rank, "This node's; -1: it has no seat.")
      .def_property_readonly("world_size", &RendezvousNews::world_size, "Number of nodes.")
      .def_property_readonly("master_addr", &RendezvousNews::master_addr)
      .def_property_readonly("master_port", &RendezvousNews::master_port)
      .def_property_readonly("nodes", &RendezvousNews::nodes, "Host and process of each, by rank.");

  py::class_<RendezvousNode, std::shared_ptr<RendezvousNode>>(
      module, "_RendezvousNode", let_go_without_gil<RendezvousNode>(),
      "This process as a node of a job whose workers torchrun starts. Blocks up to join_timeout "
      "for the place where the nodes meet. membership: launcher, etcd or kubernetes. Raises "
      "DistNetworkError, DistStoreError and, for "
      "arguments, DistArgumentError.")
      .def(py::init(&open_node), py::arg("membership"), py::arg("endpoint"), py::arg("run_id"),
           py::arg("min_nodes"), py::arg("max_nodes"), py::arg("local_addr"),
           py::arg("join_timeout"), py::arg("last_call"), py::arg("repair_timeout"),
           py::arg("keep_alive"), py::call_guard<py::gil_scoped_release>())
      .def("fileno", &RendezvousNode::descriptor, "Readable when `take` has news.")
      .def(
          "take", [](RendezvousNode& node) { return described(node.take()); },
          "The news since the last call. Never blocks.")
      .def(
          "arrive",
          [](RendezvousNode& node, std::int64_t epoch) {
            node.report(NodePhase::running, epoch, {});
          },
          py::arg("epoch"), py::call_guard<py::gil_scoped_release>(),
          "This node has come to the epoch.")
      .def(
          "fail",
          [](RendezvousNode& node, std::int64_t epoch, const std::string& reason) {
            node.report(NodePhase::failed, epoch, reason);
          },
          py::arg("epoch"), py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
          "The workers of the epoch shall start again on all nodes.")
      .def(
          "finish",
          [](RendezvousNode& node, std::int64_t epoch) {
            node.report(NodePhase::finished, epoch, {});
          },
          py::arg("epoch"), py::call_guard<py::gil_scoped_release>(),
          "The workers here have ended well. This node takes part in no later epoch.")
      .def("close", &RendezvousNode::close, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>(), "Ends the job for all nodes.")
      .def(
          "store_of",
          [](const RendezvousNode& node, const RendezvousNews& epoch, Duration timeout) {
            auto store = node.store_of(*epoch.plan, timeout);
            if (!store) group::raise_from_store(store.status());
            return std::make_shared<Store>(std::move(store).value());
          },
          py::arg("epoch"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
          "The store that the nodes of the epoch share. Raises DistStoreError and "
          "DistNetworkError.")
      .def(
          "reserve_next_port",
          [](RendezvousNode& node) {
            if (Status taken = node.reserve_next_port(); !taken) group::raise_from_store(taken);
          },
          py::call_guard<py::gil_scoped_release>(),
          "Another MASTER_PORT for the next epoch, if rank 0 is here then.")
      .def(
          "serves",
          [](const RendezvousNode& node, const RendezvousNews* epoch) {
            return node.serves(epoch != nullptr ? epoch->plan.get() : nullptr);
          },
          py::arg("epoch").none(true), "Whether other nodes of the epoch need this process.")
      .def_property_readonly("name", &RendezvousNode::name, "Host and process.");
}

}  // namespace muster::python
