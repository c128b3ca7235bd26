#include "jobs/launch/node/rendezvous_node.h"

#include <limits>
#include <utility>

#include "core/store/factory.h"

namespace muster::launch {

Result<std::unique_ptr<RendezvousNode>> RendezvousNode::open(const RendezvousNodeOptions& options) {
  RunOptions run;
  run.command = "torchrun";
  run.rendezvous = options.rendezvous;
  if (!options.endpoint.empty()) run.endpoint = options.endpoint;
  run.run_id = options.run_id;
  run.nodes = options.max_nodes;
  run.min_nodes = options.min_nodes;
  run.local_addr = options.local_addr;
  run.join_timeout = options.join_timeout;
  run.last_call = options.last_call;
  run.repair_timeout = options.repair_timeout;
  run.node_ttl = options.ttl;
  run.max_restarts = std::numeric_limits<int>::max();  // the agents count
  if (options.rendezvous == RendezvousKind::etcd && !run.endpoint)
    return Status(Code::invalid_argument,
                  "the membership in etcd needs an endpoint: HOST:PORT of one or more of its "
                  "members, separated by commas");
  auto secret = job_secret(run);
  if (!secret) return secret.status();
  auto job = open_job(run, *secret);
  if (!job) return job.status();
  auto nodes = join_nodes(run, *job, *secret);
  if (!nodes) return nodes.status();
  return std::unique_ptr<RendezvousNode>(new RendezvousNode(
      meets_in_service(run), std::move(*secret), std::move(*job), std::move(*nodes)));
}

void RendezvousNode::report(membership::NodePhase phase, std::int64_t epoch,
                            const std::string& reason) {
  nodes_->report(phase, epoch, 1, reason);
}

void RendezvousNode::close(const std::string& reason) {
  nodes_->report(membership::NodePhase::stopped, 0, 0, reason);
}

Result<std::shared_ptr<store::Store>> RendezvousNode::store_of(const EpochPlan& plan,
                                                               Duration timeout) const {
  if (!in_service_ || plan.node == 0) return std::shared_ptr<store::Store>(job_.store);
  const NodeDetails& first = plan.nodes.front();
  store::TcpStoreOptions tcp;
  tcp.host = first.store_addr;
  tcp.port = first.store_port;
  tcp.timeout = timeout;
  tcp.wait_for_workers = false;
  tcp.secret = secret_;
  tcp.job = job_.run_id == "none" ? std::string() : job_.run_id;
  tcp.role = Handshake::Role::launcher;
  auto store = store::make_tcp_store(tcp);
  if (!store)
    return store.status().with_context("connecting to the store of node 0 of epoch " +
                                       std::to_string(plan.epoch.number) + ", " + first.launcher);
  return std::shared_ptr<store::Store>(*store);
}

Status RendezvousNode::reserve_next_port() {
  auto port = ReservedPort::take();
  if (!port) return port.status();
  reserved_ = std::exchange(job_.reserved, std::make_shared<ReservedPort>(std::move(*port)));
  nodes_->set_program_port(job_.reserved->number());
  return {};
}

bool RendezvousNode::serves(const EpochPlan* plan) const {
  return job_.hosts_store && (!in_service_ || (plan != nullptr && plan->node == 0));
}

}  // namespace muster::launch
