// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/node_rendezvous.h"

#include <unistd.h>

#include <limits>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/store/factory.h"
#include "jobs/launch/node/adopted_secret.h"
#include "jobs/launch/node/host.h"
#include "jobs/membership/factory.h"

namespace muster::launch {
namespace {

constexpr std::uint16_t kStaticPort = 29500;    // torch.distributed.launch's
constexpr std::uint16_t kAssignedPort = 29400;  // torchrun's, for c10d
constexpr std::uint16_t kEtcdPort = 2379;
constexpr std::uint16_t kHttpsPort = 443;
constexpr int kBacklog = 1024;
// How long a node may be silent: where others go on without it, and where its loss ends the job.
constexpr Duration kTtlOfMany = std::chrono::milliseconds(2500);  // limit: a default that users set
constexpr Duration kTtlOfAll = std::chrono::seconds(20);
// Longer than an election of etcd's. Its leases have whole seconds, and it may be so much later
// that it ends them.
constexpr Duration kTtlInEtcd = std::chrono::seconds(5);
constexpr Duration kLeaseEnds = std::chrono::seconds(2);
constexpr Duration kServicePatience = std::chrono::seconds(20);  // with a call: elections take time

constexpr const char* kEtcdPrefix = "muster";  // of all keys
// Each renewal is told to all nodes: a shorter time is much work for the API server.
constexpr Duration kTtlInKubernetes = std::chrono::seconds(10);

// A socket at the first address of `host` that is this machine's: others try that one first too,
// and where its port is taken they meet another process there.
Result<Descriptor> listen_at(const std::string& host, std::uint16_t port, TimePoint deadline) {
  auto addresses = resolve(host, port, deadline);
  if (!addresses) return addresses.status();
  Status last(Code::network, "\"" + host + "\" has no address");
  for (const SocketAddress& address : *addresses) {
    auto socket = listen_on(address, kBacklog);
    if (socket || is_of_this_host(address)) return socket;
    last = socket.status();
  }
  return last;
}

// The service that keeps the membership: the first member of etcd's cluster that is named, or the
// API server of Kubernetes.
Result<Endpoint> service_endpoint(const RunOptions& options) {
  const bool etcd = options.rendezvous == RendezvousKind::etcd;
  std::string members = options.endpoint.value_or("");
  if (!etcd) {
    auto kubernetes = membership::kubernetes_options(members);
    if (!kubernetes) return kubernetes.status();
    members = kubernetes->server;
  }
  std::string first = members.substr(0, members.find(','));
  if (const std::size_t scheme = first.find("://"); scheme != std::string::npos)
    first = first.substr(scheme + 3);
  auto endpoint = parse_endpoint("--rdzv-endpoint", first);
  if (endpoint && !endpoint->port) endpoint->port = etcd ? kEtcdPort : kHttpsPort;
  return endpoint;
}

bool is_here(const std::string& host, TimePoint deadline) {
  return listen_at(host, 0, deadline).ok();
}

struct StorePlace {
  std::string host;
  std::uint16_t port = 0;
};

class Joining {
 public:
  Joining(const RunOptions& options, const Secret& secret) : options_(options), secret_(secret) {}
  Result<NodeJob> run();

 private:
  Result<StorePlace> place_of_job() const;
  Status open_alone();
  Status open_static(const StorePlace& place);
  Status open_assigned(const StorePlace& place);
  Status open_beside_service();
  std::string name_of(const Descriptor& socket, const std::string& otherwise) const;
  Status serve(Descriptor socket, const std::string& name);
  Status connect(const StorePlace& place);
  Status choose_program_place();

  const RunOptions& options_;
  const Secret& secret_;
  const TimePoint deadline_ = deadline_after(steady_clock(), options_.join_timeout);
  NodeJob job_;
  std::string host_name_ = full_host_name();
};

Result<StorePlace> Joining::place_of_job() const {
  const bool assigned = options_.rendezvous == RendezvousKind::assigned_ranks;
  StorePlace place{"127.0.0.1", assigned ? kAssignedPort : kStaticPort};
  if (options_.master_addr) place.host = *options_.master_addr;
  if (options_.endpoint) {
    auto endpoint = parse_endpoint("--rdzv-endpoint", *options_.endpoint);
    if (!endpoint) return endpoint.status();
    place.host = endpoint->host;
    if (endpoint->port) place.port = *endpoint->port;
  }
  if (options_.master_port) place.port = *options_.master_port;
  return place;
}

Status Joining::serve(Descriptor socket, const std::string& name) {
  auto bound = SocketAddress::local_of(socket.get());
  if (!bound) return bound.status();
  job_.master_addr = name;
  job_.master_port = bound->port();
  job_.hosts_store = options_.agent_store;
  if (options_.nodes > 1 && bound->is_loopback() && !is_loopback_name(name))
    log(LogLevel::warning, name + " is " + bound->host() +
                               " on this machine (see /etc/hosts), where other machines cannot "
                               "reach the job's store: have all nodes name another address of this "
                               "one");
  if (!options_.agent_store)
    return {};  // the port is free again when `socket` closes; rank 0 serves there
  store::TcpStoreOptions tcp;
  tcp.host = name;
  tcp.port = bound->port();
  tcp.is_server = true;
  tcp.timeout = options_.join_timeout;
  tcp.wait_for_workers = false;
  tcp.listen_descriptor = socket.release();
  tcp.secret = secret_;
  tcp.job = job_.run_id == "none" ? std::string() : job_.run_id;
  tcp.role = Handshake::Role::launcher;
  auto store = store::make_tcp_store(tcp);
  if (!store) return store.status().with_context("serving the job's store at " + bound->text());
  job_.store = *store;
  return {};
}

Status Joining::connect(const StorePlace& place) {
  store::TcpStoreOptions tcp;
  tcp.host = place.host;
  tcp.port = place.port;
  tcp.timeout = options_.join_timeout;
  tcp.wait_for_workers = false;
  tcp.secret = secret_;
  tcp.job = job_.run_id == "none" ? std::string() : job_.run_id;
  tcp.role = Handshake::Role::launcher;
  auto store = store::make_tcp_store(tcp);
  if (!store) {
    return store.status().with_context("joining the job at " + place.host + ":" +
                                       std::to_string(place.port) +
                                       ", where the launcher of node 0 should serve its store");
  }
  job_.store = *store;
  job_.master_addr = place.host;
  job_.master_port = place.port;
  return {};
}

// One node that was given no address: the store listens on loopback. Workers are told the host's
// full name (J8) where that is really this machine; what listens there is up to their program.
Status Joining::open_alone() {
  // Programs of stock torch, and its documents, take 29500 for themselves.
  const std::uint16_t port = options_.master_port.value_or(0);
  std::vector<std::string> names = {"localhost", "127.0.0.1", "::1"};
  if (options_.local_addr) names = {*options_.local_addr};
  if (options_.master_addr) names = {*options_.master_addr};
  const bool told = options_.local_addr || options_.master_addr;
  if (!told && is_here(host_name_, deadline_)) job_.program_addr = host_name_;
  Status last;
  for (const std::string& name : names) {
    auto socket = listen_at(name, port, deadline_);
    if (socket) return serve(std::move(*socket), name);
    last = socket.status();
  }
  return last.with_context("looking for an address to serve the job's store at");
}

Status Joining::open_static(const StorePlace& place) {
  if (options_.nodes > 1 && options_.node_rank.value_or(0) != 0) return connect(place);
  const std::string listen_host = options_.local_addr.value_or(place.host);
  auto socket = listen_at(listen_host, place.port, deadline_);
  if (socket) return serve(std::move(*socket), place.host);
  return socket.status().with_context("node 0 cannot serve the job's store at " + listen_host +
                                      ":" + std::to_string(place.port) +
                                      " (is another job running there? is it an address of this "
                                      "machine? --local-addr says where to listen)");
}

// The one launcher that can listen at the endpoint serves the store; all others connect to it. An
// address that was given for this node does not count: every node could listen at its own, and each
// would wait for the others alone.
Status Joining::open_assigned(const StorePlace& place) {
  auto socket = listen_at(place.host, place.port, deadline_);
  if (!socket && options_.offer)
    return socket.status().with_context(
        "the first node cannot serve the job's store (--local-addr and --master-port say where)");
  if (!socket) return connect(place);
  const std::string name = name_of(*socket, place.host);
  return serve(std::move(*socket), name);
}

// The full name (J8) where it leads to the same socket.
std::string Joining::name_of(const Descriptor& socket, const std::string& otherwise) const {
  const auto bound = SocketAddress::local_of(socket.get());
  const auto named = resolve(host_name_, 0, deadline_);
  for (std::size_t i = 0; bound && named && i < named->size(); ++i) {
    if ((*named)[i].host() == bound->host() && !bound->is_loopback()) return host_name_;
  }
  return otherwise;
}

// Nodes meet in etcd or Kubernetes. Every launcher serves a store for the epochs in which its node
// is the first, at the address from which this host reaches that service.
Status Joining::open_beside_service() {
  const auto endpoint = service_endpoint(options_);
  if (!endpoint) return endpoint.status();
  std::string host = options_.local_addr.value_or("");
  if (host.empty()) {
    const auto members = resolve(endpoint->host, *endpoint->port, deadline_);
    if (!members) return members.status().with_context("looking for the way to " + endpoint->host);
    const auto own = address_towards(members->front());
    if (!own) return own.status().with_context("looking for the way to " + endpoint->host);
    host = own->host();
  }
  auto socket = listen_at(host, 0, deadline_);
  if (!socket)
    return socket.status().with_context("this node cannot serve a store for its workers at " +
                                        host + " (--local-addr says where)");
  const std::string name = name_of(*socket, host);
  return serve(std::move(*socket), name);
}

// The store has a port already, and stock torch's rank 0 opens a store of its own at MASTER_PORT.
Status Joining::choose_program_place() {
  if (job_.program_addr.empty()) job_.program_addr = job_.master_addr;
  job_.program_port = job_.master_port;
  if (!options_.agent_store) return {};
  auto port = ReservedPort::take();
  if (!port) return port.status();
  if (!job_.hosts_store) job_.program_addr = options_.local_addr.value_or(host_name_);
  job_.program_port = port->number();
  job_.reserved = std::make_shared<ReservedPort>(std::move(*port));
  return {};
}

Result<NodeJob> Joining::run() {
  const bool in_service = meets_in_service(options_);
  const bool assigned = in_service || options_.rendezvous == RendezvousKind::assigned_ranks;
  const bool alone =
      options_.standalone || (options_.nodes == 1 && (in_service || !options_.endpoint));
  const bool unnamed = options_.standalone || (alone && assigned);
  job_.run_id = options_.run_id.value_or(unnamed ? random_name(6) : "none");
  job_.self = NodeFacts{options_.workers, options_.role, host_name_, options_.max_restarts};
  job_.launcher = host_name_ + ", process " + std::to_string(::getpid());
  if (alone || in_service) {
    if (Status opened = alone ? open_alone() : open_beside_service(); !opened) return opened;
  } else {
    const auto place = place_of_job();
    if (!place) return place.status();
    if (Status opened = assigned ? open_assigned(*place) : open_static(*place); !opened)
      return opened;
  }
  if (Status chosen = choose_program_place(); !chosen) return chosen;
  return std::move(job_);
}

Result<std::unique_ptr<membership::Membership>> make_membership(const RunOptions& options,
                                                                const NodeJob& job,
                                                                const Secret& secret,
                                                                const NodeMembershipOptions& node) {
  // A node whose lease ran out keeps its workers for a time. It hears by its watch what became of
  // the job, so it does not stop watching before they have ended.
  const Duration ttl = node.ttl, watch_limit = ttl + node.out_limit;
  if (options.rendezvous == RendezvousKind::etcd)
    return membership::make_etcd_membership(
        store::etcd::options_from_environment(*options.endpoint), kEtcdPrefix, job.run_id, secret,
        kServicePatience, watch_limit);
  if (options.rendezvous != RendezvousKind::kubernetes)
    return membership::make_agent_membership(job.store, job.run_id, ttl, watch_limit);
  const auto kubernetes = membership::kubernetes_options(options.endpoint.value_or(""));
  if (!kubernetes) return kubernetes.status();
  return membership::make_kubernetes_membership(*kubernetes, job.run_id, secret, kServicePatience,
                                                watch_limit);
}

std::string nodes_text(const RunOptions& options) {
  const std::string most = std::to_string(options.nodes);
  return is_elastic(options) ? std::to_string(least_nodes(options)) + " to " + most : most;
}

}  // namespace

Result<Secret> job_secret(const RunOptions& options) {
  auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  if (has_given_secret() || insecure->value_or(false)) return Secret::from_environment();
  if (options.nodes == 1) return Secret::random();
  std::string master = options.master_addr.value_or("127.0.0.1");
  const bool in_service = meets_in_service(options);
  if (options.endpoint || in_service) {
    auto endpoint = in_service ? service_endpoint(options)
                               : parse_endpoint("--rdzv-endpoint", *options.endpoint);
    if (!endpoint) return endpoint.status();
    master = endpoint->host;
  }
  if (!is_here(master, deadline_after(steady_clock(), options.join_timeout))) {
    return Status(Code::refused, "this job has " + std::to_string(options.nodes) + " nodes and " +
                                     (in_service ? "the service where they meet" : "node 0") +
                                     " is " + master +
                                     ", which is not this machine, but no secret was given: start "
                                     "every node with the same MUSTER_SECRET (`muster secret` "
                                     "makes one) or MUSTER_SECRET_FILE in its environment");
  }
  log(LogLevel::warning,
      "no MUSTER_SECRET was given: only nodes of this user on this machine can join; for other "
      "machines start every node with the "
      "same MUSTER_SECRET or MUSTER_SECRET_FILE");
  return Secret::from_environment();
}

Result<NodeJob> open_job(const RunOptions& options, const Secret& secret) {
  return Joining(options, secret).run();
}

Result<std::unique_ptr<NodeMembership>> join_nodes(const RunOptions& options, const NodeJob& job,
                                                   const Secret& secret) {
  NodeMembershipOptions member;
  member.job = job.run_id;
  const bool in_service = meets_in_service(options);
  const bool etcd = options.rendezvous == RendezvousKind::etcd;
  member.place = etcd ? "etcd at " + *options.endpoint
                 : in_service
                     ? "Kubernetes"
                     : "the job's store at " + endpoint_text({job.master_addr, job.master_port}) +
                           (job.hosts_store ? ", which this node's launcher serves,"
                                            : ", which another node's launcher serves,");
  member.epochs = epoch_options(options);
  member.ttl = options.node_ttl.value_or(!member.epochs.wait_for_nodes ? kTtlOfAll
                                         : etcd                        ? kTtlInEtcd
                                         : in_service                  ? kTtlInKubernetes
                                                                       : kTtlOfMany);
  member.out_limit =
      options.service_timeout.value_or(std::max(member.out_limit, options.repair_timeout));
  member.epochs.silence_patience = member.out_limit;
  const bool numbered = options.rendezvous == RendezvousKind::static_ranks;
  if (numbered) member.wanted_slot = options.node_rank.value_or(0);
  member.name = "node/" + (numbered ? std::to_string(member.wanted_slot)
                                    : job.launcher + ", " + random_name(4));
  // A member that is blamed and says nothing is dead, if its lease ends.
  if (in_service) member.epochs.failures.death_patience = member.ttl + kLeaseEnds;
  // Workers that stay do not fail because another node is lost.
  if (in_service && member.epochs.wait_for_nodes && !options.keep_workers)
    member.epochs.failure_patience = member.ttl + kLeaseEnds;
  auto membership = make_membership(options, job, secret, member);
  if (!membership) return membership.status();
  NodeDetails details{job.self, job.launcher, job.program_addr, job.program_port};
  details.program = options.program;
  if (in_service) {
    details.store_addr = job.master_addr;
    details.store_port = job.master_port;
  }
  if (!in_service && job.hosts_store && member.epochs.wait_for_nodes && options.nodes > 1)
    log(LogLevel::warning, "this node serves the job's store at " +
                               endpoint_text({job.master_addr, job.master_port}) +
                               ": the job ends with it, though it survives the loss of any other "
                               "node; a job that meets in etcd or Kubernetes survives the loss of "
                               "any (--rdzv-backend)");
  std::string place = member.place;
  const int wanted = member.wanted_slot;
  auto joined = NodeMembership::join(std::move(*membership), std::move(member), std::move(details));
  if (!joined) return joined;
  const int others = least_nodes(options) - 1;
  if (others > 0)
    log(LogLevel::info,
        (numbered ? "node " + std::to_string(wanted) : "a node") + " of " + nodes_text(options) +
            ", " +
            (etcd ? place : "store at " + endpoint_text({job.master_addr, job.master_port})) +
            ": waiting for " + std::to_string(others) +
            (others == 1 ? " other node" : " other nodes"));
  return joined;
}

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
  run.max_restarts = std::numeric_limits<int>::max();  // the launchers count
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
