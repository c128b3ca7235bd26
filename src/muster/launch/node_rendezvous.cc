#include "muster/launch/node_rendezvous.h"

#include <unistd.h>

#include "muster/base/bytes.h"
#include "muster/base/env.h"
#include "muster/base/log.h"
#include "muster/base/socket_address.h"
#include "muster/launch/host.h"
#include "muster/store/factory.h"

namespace muster::launch {
namespace {

constexpr std::uint16_t kStaticPort = 29500;    // torch.distributed.launch's
constexpr std::uint16_t kAssignedPort = 29400;  // torchrun's, for c10d
constexpr int kBacklog = 1024;

// A socket at the first address of `host` that is this machine's and free.
Result<Descriptor> listen_at(const std::string& host, std::uint16_t port, TimePoint deadline) {
  auto addresses = resolve(host, port, deadline);
  if (!addresses) return addresses.status();
  Status last(Code::network, "\"" + host + "\" has no address");
  for (const SocketAddress& address : *addresses) {
    auto socket = listen_on(address, kBacklog);
    if (socket) return socket;
    last = socket.status();
  }
  return last;
}

bool is_here(const std::string& host, TimePoint deadline) {
  return listen_at(host, 0, deadline).ok();
}

struct Place {
  std::string host;
  std::uint16_t port = 0;
};

class Joining {
 public:
  Joining(const RunOptions& options, const Secret& secret) : options_(options), secret_(secret) {}
  Result<NodeJob> run();

 private:
  Result<Place> place_of_job() const;
  Status open_alone();
  Status open_static(const Place& place);
  Status open_assigned(const Place& place);
  Status serve(Descriptor socket, const std::string& name);
  Status connect(const Place& place);
  Status claim_number();
  Status exchange();
  Status choose_program_place();
  Status tell_program_place();
  Status learn_program_place();
  bool claim(int number, std::string* holder);

  const RunOptions& options_;
  const Secret& secret_;
  const TimePoint deadline_ = deadline_after(steady_clock(), options_.join_timeout);
  NodeJob job_;
  std::string host_name_ = full_host_name();
  std::string token_;
};

Result<Place> Joining::place_of_job() const {
  const bool assigned = options_.rendezvous == RendezvousKind::assigned_ranks;
  Place place{"127.0.0.1", assigned ? kAssignedPort : kStaticPort};
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

Status Joining::connect(const Place& place) {
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
                                       ", where the agent of node 0 should serve its store");
  }
  job_.store = *store;
  job_.master_addr = place.host;
  job_.master_port = place.port;
  return {};
}

// One node that was given no address: the store listens on loopback. Workers are told the host's
// full name (J8) where that is really this machine; what listens there is up to their program.
Status Joining::open_alone() {
  const bool assigned = options_.rendezvous == RendezvousKind::assigned_ranks;
  const std::uint16_t usual = options_.standalone || assigned ? 0 : kStaticPort;
  const std::uint16_t port = options_.master_port.value_or(usual);
  std::vector<std::string> names = {"localhost", "127.0.0.1", "::1"};
  if (options_.local_addr) names = {*options_.local_addr};
  if (options_.master_addr) names = {*options_.master_addr};
  const bool told = options_.local_addr || options_.master_addr;
  if (!told && is_here(host_name_, deadline_)) job_.program_addr = host_name_;
  Status last;
  for (const std::string& name : names) {
    auto socket = listen_at(name, port, deadline_);
    if (!socket && port != 0 && !options_.master_port)
      socket = listen_at(name, 0, deadline_);  // another job has the usual port
    if (socket) return serve(std::move(*socket), name);
    last = socket.status();
  }
  return last.with_context("looking for an address to serve the job's store at");
}

Status Joining::open_static(const Place& place) {
  if (options_.nodes > 1 && options_.node_rank.value_or(0) != 0) return connect(place);
  const std::string listen_host = options_.local_addr.value_or(place.host);
  auto socket = listen_at(listen_host, place.port, deadline_);
  if (socket) return serve(std::move(*socket), place.host);
  return socket.status().with_context("node 0 cannot serve the job's store at " + listen_host +
                                      ":" + std::to_string(place.port) +
                                      " (is another job running there? is it an address of this "
                                      "machine? --local-addr says where to listen)");
}

// Whoever can listen at the endpoint serves the store; all others connect to it.
Status Joining::open_assigned(const Place& place) {
  auto socket = listen_at(options_.local_addr.value_or(place.host), place.port, deadline_);
  if (!socket) return connect(place);
  // The full name (J8) where it leads to the same socket, else the one that all nodes were told.
  const auto bound = SocketAddress::local_of(socket->get());
  const auto named = resolve(host_name_, 0, deadline_);
  std::string name = options_.local_addr.value_or(place.host);
  for (std::size_t i = 0; bound && named && i < named->size(); ++i) {
    if ((*named)[i].host() == bound->host() && !bound->is_loopback()) name = host_name_;
  }
  return serve(std::move(*socket), name);
}

bool Joining::claim(int number, std::string* holder) {
  auto now =
      job_.store->compare_set(job_.key_prefix + "claim/" + std::to_string(number), "", token_);
  if (!now) return false;
  *holder = *now;
  return *now == token_;
}

Status Joining::claim_number() {
  const std::string size = std::to_string(options_.nodes);
  std::string holder;
  if (options_.node_rank) {
    job_.node = *options_.node_rank;
    if (claim(job_.node, &holder)) return {};
    return Status(Code::invalid_argument, "node rank " + std::to_string(job_.node) +
                                              " is taken already, by " + holder +
                                              "; every node of the job needs a --node-rank of its "
                                              "own (and every job a --rdzv-id of its own)");
  }
  // The one that serves is 0; the others take what is left, first come, first numbered.
  for (int tried = 0; tried < options_.nodes; ++tried) {
    const int number = job_.hosts_store ? tried : (tried + 1) % options_.nodes;
    if (!claim(number, &holder)) continue;
    job_.node = number;
    return {};
  }
  return Status(Code::invalid_argument, "all " + size + " nodes of the job \"" + job_.run_id +
                                            "\" have come already; is one started twice?");
}

Status Joining::exchange() {
  const std::string me =
      "node " + std::to_string(job_.node) + " of " + std::to_string(options_.nodes);
  const std::string master_key = job_.key_prefix + "master";
  if (job_.hosts_store) {
    job_.host_node = job_.node;
    ByteWriter writer;
    writer.put(std::int32_t{job_.node}).put_text(job_.master_addr);
    if (Status set = job_.store->set(master_key, writer.view()); !set) return set.with_context(me);
  } else {
    auto master = job_.store->get(master_key, options_.join_timeout);
    if (!master)
      return master.status().with_context(me + ", asking for the address of the job's store");
    ByteReader reader(*master);
    job_.host_node = reader.get<std::int32_t>();
    job_.master_addr = reader.get_text();
    if (!reader.at_end() || job_.host_node < 0 || job_.host_node >= options_.nodes) {
      return Status(Code::mismatch,
                    me + ": the address of the job's store came in a form that this version does "
                         "not know; run the same muster everywhere");
    }
  }
  if (const Status place = job_.node == 0 ? tell_program_place() : Status(); !place)
    return place.with_context(me);
  const std::string others =
      std::to_string(options_.nodes - 1) + (options_.nodes == 2 ? " other node" : " other nodes");
  log(LogLevel::info, me + ", store at " + job_.master_addr + ":" +
                          std::to_string(job_.master_port) + ": waiting for " + others);
  const NodeFacts facts{options_.workers, options_.role, host_name_, options_.max_restarts};
  auto all = job_.store->all_gather(job_.key_prefix + "nodes", job_.node, options_.nodes,
                                    encode(facts), options_.join_timeout);
  if (!all)
    return all.status().with_context(
        me + ", waiting for all nodes (the numbers of those missing are nodes' numbers)");
  job_.nodes.clear();
  for (const std::string& record : *all) {
    auto node = decode_node_facts(record);
    if (!node) return node.status();
    job_.nodes.push_back(std::move(*node));
  }
  return job_.node == 0 ? Status() : learn_program_place().with_context(me);
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

Status Joining::tell_program_place() {
  if (Status chosen = choose_program_place(); !chosen) return chosen;
  ByteWriter writer;
  writer.put(job_.program_port).put_text(job_.program_addr);
  return job_.store->set(job_.key_prefix + "program", writer.view());
}

Status Joining::learn_program_place() {
  auto place = job_.store->get(job_.key_prefix + "program", options_.join_timeout);
  if (!place)
    return place.status().with_context("asking node 0 where the program's ranks are to meet");
  ByteReader reader(*place);
  job_.program_port = reader.get<std::uint16_t>();
  job_.program_addr = reader.get_text();
  if (reader.at_end()) return {};
  return Status(Code::mismatch,
                "where the program's ranks are to meet came in a form that this version does not "
                "know; run the same muster everywhere");
}

Result<NodeJob> Joining::run() {
  const bool assigned = options_.rendezvous == RendezvousKind::assigned_ranks;
  const bool alone = options_.standalone || (options_.nodes == 1 && !options_.endpoint);
  const bool unnamed = options_.standalone || (alone && assigned);
  job_.run_id = options_.run_id.value_or(unnamed ? random_name(6) : "none");
  job_.key_prefix = "muster/run/" + job_.run_id + "/";
  token_ = host_name_ + ", process " + std::to_string(::getpid());
  auto place = place_of_job();
  if (!place) return place.status();
  const Status opened = alone      ? open_alone()
                        : assigned ? open_assigned(*place)
                                   : open_static(*place);
  if (!opened) return opened;
  if (options_.nodes == 1) {
    job_.node = 0;
    job_.nodes = {NodeFacts{options_.workers, options_.role, host_name_, options_.max_restarts}};
    if (Status chosen = choose_program_place(); !chosen) return chosen;
    return std::move(job_);
  }
  if (Status claimed = claim_number(); !claimed) return claimed;
  if (Status told = exchange(); !told) return told;
  return std::move(job_);
}

}  // namespace

Result<Secret> job_secret(const RunOptions& options) {
  const bool given =
      env_text("MUSTER_SECRET") || env_text("MUSTER_SECRET_FD") || env_text("MUSTER_SECRET_FILE");
  auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  if (given || insecure->value_or(false)) return Secret::from_environment();
  if (options.nodes == 1) return Secret::random();
  std::string master = options.master_addr.value_or("127.0.0.1");
  if (options.endpoint) {
    auto endpoint = parse_endpoint("--rdzv-endpoint", *options.endpoint);
    if (!endpoint) return endpoint.status();
    master = endpoint->host;
  }
  if (!is_here(master, deadline_after(steady_clock(), options.join_timeout))) {
    return Status(Code::refused, "this job has " + std::to_string(options.nodes) +
                                     " nodes and node 0 is " + master +
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

Result<NodeJob> join_nodes(const RunOptions& options, const Secret& secret) {
  return Joining(options, secret).run();
}

}  // namespace muster::launch
