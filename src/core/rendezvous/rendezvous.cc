// SPDX-License-Identifier: BSD-3-Clause
#include "core/rendezvous/rendezvous.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/base/environment.h"
#include "core/net/socket_address.h"
#include "core/net/this_host.h"
#include "core/rendezvous/join.h"
#include "core/rendezvous/launch_exchange.h"
#include "core/rendezvous/scheduler.h"
#include "core/security/secret.h"
#include "core/store/factory.h"

namespace muster::store {
namespace {

constexpr int kMostRanks = 1 << 20;  // limit: a world size that is a mistake

/// A number that may be given in two places: as an argument (-1: absent) and in the URL's query.
Status settle(int& argument, const std::optional<int>& query, const char* name) {
  if (!query) return {};
  if (argument >= 0 && argument != *query) {
    return Status(Code::invalid_argument, std::string(name) + " is " + std::to_string(argument) +
                                              " as an argument and " + std::to_string(*query) +
                                              " in the init method");
  }
  argument = *query;
  return {};
}

/// The argument, else the environment variable, else the value from srun or mpirun.
Status settle_from_environment(int& value, const char* name, int low,
                               std::optional<int> scheduled) {
  if (value >= 0) return {};
  const auto found = env_integer(name, low, kMostRanks);
  if (!found) return found.status();
  if (!*found && scheduled) {
    value = *scheduled;
    return {};
  }
  if (!*found) {
    return Status(
        Code::invalid_argument,
        std::string("env:// needs the environment variable ") + name +
            ", which is not set; start the program with a launcher (muster run) or give " +
            (low == 0 ? "rank" : "world_size") + " as an argument");
  }
  value = static_cast<int>(**found);
  return {};
}

Status check_range(const MeetingOptions& options, bool may_assign) {
  if (options.world_size < 1 || options.world_size > kMostRanks) {
    return Status(
        Code::invalid_argument,
        "world_size is " +
            (options.world_size < 0 ? std::string("missing") : std::to_string(options.world_size)) +
            "; give it as an argument or in the init method (?world_size=4), from 1 to " +
            std::to_string(kMostRanks));
  }
  if (options.rank >= options.world_size || options.rank < -1 ||
      (options.rank < 0 && !may_assign)) {
    return Status(Code::invalid_argument, "rank " + std::to_string(options.rank) +
                                              " is not within 0 to " +
                                              std::to_string(options.world_size - 1) +
                                              " (world size " + std::to_string(options.world_size) +
                                              "); check the rank and world_size arguments, the "
                                              "init method's query, or RANK and WORLD_SIZE");
  }
  return {};
}

enum class Host { never, first_come, rank_zero };

struct TcpRendezvous {
  std::string host;
  std::vector<std::string> also_at{};  // to listen at
  std::uint16_t port = 0;
  Host hosts = Host::rank_zero;
  std::int64_t epoch = 0;  // of a job whose nodes may change; 0: they do not
  MeetingOptions join;
};

/// Opens the store if this process is to host it, else connects to it.
Result<std::shared_ptr<TcpStore>> open_store(const TcpRendezvous& way, const Secret& secret) {
  TcpStoreOptions options;
  options.host = way.host;
  options.port = way.port;
  options.also_at = way.also_at;
  options.secret = secret;
  options.epoch = way.epoch;
  if (way.epoch > 0)
    options.epoch_record = epoch_record(env_text("TORCHELASTIC_RUN_ID").value_or(""));
  options.timeout = time_left(steady_clock(), way.join.deadline);
  // With a group name several jobs may share this address. The first process hosts the store for
  // all of them.
  const bool shared = !way.join.group_name.empty();
  options.multi_tenant = shared;
  if (way.hosts == Host::rank_zero) options.host_rank = 0;
  options.is_server =
      way.hosts == Host::first_come || (way.hosts == Host::rank_zero && way.join.rank == 0);
  if (!options.is_server) return make_tcp_store(options);
  auto own = make_tcp_store(options);
  if (own || own.status().code() == Code::refused || (!shared && way.hosts != Host::first_come))
    return own;
  options.is_server = false;
  options.timeout = time_left(steady_clock(), way.join.deadline);
  auto other = make_tcp_store(options);
  if (other) return other;
  return Status(
      other.status().code(),
      other.status().message() + "; nor could this process host it: " + own.status().message(),
      other.status().ranks());
}

/// How long a rank waits for a new store if the store vanishes while it joins: rank 0 may be
/// between two runs.
constexpr Duration kBetweenStores = std::chrono::seconds(30);

Result<Rendezvous> rendezvous_by_tcp(TcpRendezvous way) {
  const auto secret = Secret::from_environment();
  if (!secret) return secret.status().with_context(cannot_join(way.join.rank, way.join));
  const bool knows_host = way.hosts == Host::rank_zero && way.join.rank != 0;
  const TimePoint deadline = way.join.deadline;
  for (Status lost;;) {
    if (!lost) way.join.deadline = std::min(deadline, steady_clock().now() + kBetweenStores);
    const auto store = open_store(way, *secret);
    way.join.deadline = deadline;
    if (!store && !lost && store.status().code() == Code::timed_out) {
      return Status(Code::peer_failed,
                    cannot_join(way.join.rank, way.join) +
                        ": the store's host ended while the ranks were joining, and no other came "
                        "in its place (" +
                        lost.message() + ")",
                    lost.ranks());
    }
    if (!store) {
      const bool late = knows_host && store.status().code() == Code::timed_out;
      const Status status =
          late ? Status(Code::timed_out, store.status().message(), {0}) : store.status();
      return status.with_context(cannot_join(way.join.rank, way.join));
    }
    auto joined = join(*store, way.join);
    if (joined) {
      joined->host = (*store)->host();
      return joined;
    }
    // The store may have belonged to a run that was ending; the new run's store will replace it.
    if (joined.status().code() != Code::network || steady_clock().now() >= deadline) return joined;
    lost = joined.status();
  }
}

/// Rank 0 without MASTER_ADDR: the others have been told some address of this host, so it listens
/// on loopback and, unless only this host may come, at the address of the interface that is named,
/// else of the one that leads to other hosts.
Status place_of_rank_zero(TcpRendezvous& way) {
  const auto secret = Secret::from_environment();
  if (!secret) return secret.status();
  way.host = "localhost";
  if (secret->kind() == Secret::Kind::host) return {};
  way.also_at = {"127.0.0.1", "::1",
                 "127.0.1.1"};  // the last is Debian's address of the own host name
  if (const auto names = named_interfaces(); !names.empty()) {
    const auto there = interface_addresses(names.front());
    if (!there) return there.status();
    way.host = there->front().host();
  } else if (const auto address = address_of_default_route()) {
    way.host = address->host();
  }
  return {};
}

/// For ranks that another launcher started on one host: they meet without an address.
Result<Rendezvous> rendezvous_on_this_host(const SchedulerRanks& scheduler, MeetingOptions join) {
  join.where = "the job that " + scheduler.name + " has started on this host (env://)";
  const auto folder = host_directory();
  if (!folder) return folder.status().with_context(cannot_join(join.rank, join));
  const std::string name = hexadecimal(short_hash(scheduler.job));
  auto joined = rendezvous_by_file(*folder + "/meeting-" + name, std::move(join));
  if (joined) joined->any_host = false;
  return joined;
}

/// For ranks of another launcher on several hosts that can share a text: rank 0's address.
Result<Rendezvous> rendezvous_by_exchange(const SchedulerRanks& scheduler, MeetingOptions join) {
  join.where = "the job that " + scheduler.name + " has started (env://)";
  const auto secret = Secret::from_environment();
  if (!secret) return secret.status().with_context(cannot_join(join.rank, join));
  const TimePoint deadline = join.deadline;
  const auto share = [&](const std::string& text) {
    return share_from_rank_zero(scheduler.exchange, scheduler.rank, text, deadline);
  };
  const std::string here = host_name();
  TcpRendezvous way;
  way.join = std::move(join);
  if (scheduler.rank == 0) {
    if (Status placed = place_of_rank_zero(way); !placed) return placed;
    const auto store = open_store(way, *secret);
    if (!store) return store.status().with_context(cannot_join(0, way.join));
    const auto told = share(way.host + " " + std::to_string((*store)->port()) + " " + here);
    if (!told) return told.status().with_context(cannot_join(0, way.join));
    auto joined = store::join(*store, way.join);
    if (joined) joined->host = (*store)->host();
    return joined;
  }
  const auto told = share({});
  if (!told) return told.status().with_context(cannot_join(way.join.rank, way.join));
  std::istringstream words(*told);
  std::string host_of_zero;
  if (!(words >> way.host >> way.port >> host_of_zero))
    return Status(Code::network, cannot_join(way.join.rank, way.join) + ": rank 0 shared \"" +
                                     *told + "\"; expected its address");
  if (secret->kind() == Secret::Kind::host && host_of_zero != here) {
    return Status(Code::refused,
                  cannot_join(way.join.rank, way.join) + ": rank 0 runs on " + host_of_zero +
                      " and this rank on " + here +
                      "; without a secret only ranks of one host can join. Set MUSTER_SECRET, the "
                      "same on all ranks (muster secret makes one)");
  }
  return rendezvous_by_tcp(way);
}

/// The name of rank 0's host where the scheduler says it.
std::string master_of(const SchedulerRanks& scheduler) {
  return scheduler.master_shares_domain ? in_own_domain(scheduler.master) : scheduler.master;
}

/// Rank 0 also listens where the others look for it, by the name that they know.
void listen_as(const std::string& master, TcpRendezvous& way) {
  const auto addresses = resolve(master, 0, way.join.deadline);
  if (!addresses || way.also_at.empty()) return;
  for (const SocketAddress& each : *addresses) way.also_at.push_back(each.host());
}

/// The error for a missing variable.
Status missing_address(const std::string& variable, const std::string& meaning,
                       const std::optional<SchedulerRanks>& scheduler) {
  std::string text =
      "env:// needs the environment variable " + variable + ", which is not set; it is " + meaning;
  if (scheduler) {
    text += ". " + scheduler->name + " has started this process as rank " +
            std::to_string(scheduler->rank) + " of " + std::to_string(scheduler->world_size) +
            " and tells it no address: set MASTER_ADDR to the name of the host on which rank 0 "
            "runs, and MASTER_PORT to a port that is free "
            "there, the same on all ranks";
  }
  return Status(Code::invalid_argument, text);
}

/// Whether rank and world size are those that the launcher assigned.
bool as_scheduled(const MeetingOptions& join, const std::optional<SchedulerRanks>& scheduler) {
  return scheduler && join.rank == scheduler->rank && join.world_size == scheduler->world_size;
}

/// The launcher serves its store at `agent`, HOST:PORT.
Status place_of_agent(const std::string& agent, TcpRendezvous& way) {
  const auto url = parse_init_url("tcp://" + agent);
  if (!url)
    return url.status().with_context(
        "reading MUSTER_AGENT_STORE, where the launcher serves its store");
  way.host = url->host;
  way.port = url->port;
  way.hosts = Host::never;
  return {};
}

/// MASTER_ADDR and MASTER_PORT: rank 0 hosts the store there, or torchrun's agent.
Status place_of_master(const MeetingOptions& join, std::uint16_t port,
                       const std::optional<SchedulerRanks>& scheduler, TcpRendezvous& way) {
  const auto torch_agent = env_flag("TORCHELASTIC_USE_AGENT_STORE");
  const bool agent = torch_agent && torch_agent->value_or(false);
  way.port = port;
  way.hosts = agent ? Host::never : Host::rank_zero;
  if (const auto host = env_text("MASTER_ADDR")) {
    way.host = *host;
  } else if (join.rank == 0 && !agent) {
    if (Status placed = place_of_rank_zero(way); !placed) return placed;
    if (as_scheduled(join, scheduler) && !scheduler->master.empty())
      listen_as(master_of(*scheduler), way);
  } else if (as_scheduled(join, scheduler) && scheduler->one_host) {
    way.host = "localhost";
  } else if (as_scheduled(join, scheduler) && !scheduler->master.empty()) {
    way.host = master_of(*scheduler);
  } else {
    return missing_address("MASTER_ADDR", "the host of rank 0", scheduler);
  }
  return {};
}

Result<Rendezvous> rendezvous_by_environment(MeetingOptions join, std::int64_t given_epoch,
                                             const std::string& given_store) {
  const auto scheduler = detect_scheduler();
  const auto scheduled = [&](int SchedulerRanks::*number) {
    return scheduler ? std::optional(*scheduler.*number) : std::nullopt;
  };
  if (Status world = settle_from_environment(join.world_size, "WORLD_SIZE", 1,
                                             scheduled(&SchedulerRanks::world_size));
      !world)
    return world;
  if (Status rank = settle_from_environment(join.rank, "RANK", 0, scheduled(&SchedulerRanks::rank));
      !rank)
    return rank;
  if (Status range = check_range(join, false); !range) return range;
  TcpRendezvous way;
  const auto told_store = env_text("MUSTER_AGENT_STORE");
  if (const auto agent = given_store.empty() ? told_store : std::optional(given_store)) {
    if (Status place = place_of_agent(*agent, way); !place) return place;
  } else {
    auto port = env_integer("MASTER_PORT", 1, 65535);
    if (!port) return port.status();
    if (!*port && !env_text("MASTER_ADDR") && as_scheduled(join, scheduler)) {
      if (scheduler->can_meet_on_this_host())
        return rendezvous_on_this_host(*scheduler, std::move(join));
      if (scheduler->exchange != SchedulerRanks::AddressExchange::none)
        return rendezvous_by_exchange(*scheduler, std::move(join));
    }
    if (!*port && as_scheduled(join, scheduler) && scheduler->port) *port = *scheduler->port;
    if (!*port) return missing_address("MASTER_PORT", "the port of rank 0's store", scheduler);
    if (Status place = place_of_master(join, static_cast<std::uint16_t>(**port), scheduler, way);
        !place)
      return place;
  }
  const auto restart =
      env_integer("TORCHELASTIC_RESTART_COUNT", 0, std::numeric_limits<std::int64_t>::max());
  if (!restart) return restart.status();
  if (way.hosts == Host::never) join.scope = "restart " + std::to_string(restart->value_or(0));
  const auto told = env_integer("MUSTER_EPOCH", 0, std::numeric_limits<std::int64_t>::max());
  if (!told) return told.status();
  const std::int64_t epoch = given_epoch > 0 ? given_epoch : told->value_or(0);
  if (way.hosts == Host::never && epoch > 0) {
    way.epoch = epoch;
    join.scope = "epoch " + std::to_string(way.epoch);
  }
  join.where = "the job at " + way.host + ":" + std::to_string(way.port) + " (env://)";
  way.join = std::move(join);
  return rendezvous_by_tcp(way);
}

}  // namespace

namespace {

/// The address of the TCP store, also if other stores wrap it; empty for other kinds.
std::string served_at(std::shared_ptr<Store> store) {
  while (auto below = underlying_store(*store)) store = std::move(below);
  const auto* tcp = dynamic_cast<const TcpStore*>(store.get());
  return tcp == nullptr ? std::string() : tcp->host();
}

}  // namespace

std::string launcher_prefix(const std::string& run_id) { return "muster/run/" + run_id + "/"; }
std::string epoch_record(const std::string& run_id) { return launcher_prefix(run_id) + "epoch"; }

Result<Rendezvous> rendezvous_over(std::shared_ptr<Store> store, const RendezvousOptions& options) {
  MeetingOptions join;
  join.rank = options.rank;
  join.world_size = options.world_size;
  join.group_name = options.group_name;
  join.deadline = deadline_after(steady_clock(), options.timeout);
  join.where = "the job on the given " + std::string(store->kind()) + " store";
  join.registers = false;
  if (Status range = check_range(join, false); !range) return range;
  auto found = store::join(store, join);
  if (!found) return found;
  found->host = served_at(store);
  while (auto below = underlying_store(*store)) store = std::move(below);
  found->any_host = std::string_view(store->kind()) == "etcd";
  return found;
}

Result<Rendezvous> rendezvous(const RendezvousOptions& options) {
  const auto url = parse_init_url(options.init_method);
  if (!url) return url.status();
  MeetingOptions join;
  join.rank = options.rank;
  join.world_size = options.world_size;
  join.group_name = options.group_name;
  join.deadline = deadline_after(steady_clock(), options.timeout);
  join.where = "the job at " + options.init_method;
  if (Status rank = settle(join.rank, url->rank, "rank"); !rank) return rank;
  if (Status world = settle(join.world_size, url->world_size, "world_size"); !world) return world;
  Result<Rendezvous> joined = Status(Code::internal, "no rendezvous was tried");
  if (url->scheme == InitUrl::Scheme::env) {
    joined = rendezvous_by_environment(std::move(join), options.epoch, options.agent_store);
  } else {
    if (Status range = check_range(join, true); !range)
      return range.with_context(options.init_method);
    const auto numeric = SocketAddress::numeric(url->host, url->port);
    if (url->scheme == InitUrl::Scheme::file) {
      joined = rendezvous_by_file(url->path, std::move(join));
    } else if (numeric && numeric->is_multicast()) {
      joined = rendezvous_by_multicast(url->host, url->port, std::move(join));
    } else {
      const Host hosts = join.rank < 0 ? Host::first_come : Host::rank_zero;
      joined = rendezvous_by_tcp({url->host, {}, url->port, hosts, 0, std::move(join)});
    }
  }
  if (joined) joined->store->set_timeout(options.timeout);
  return joined;
}

}  // namespace muster::store
