// SPDX-License-Identifier: BSD-3-Clause
#include "lab/model/cost.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>
#include <vector>

#include "core/collective/plan/plan.h"
#include "lab/model/payload_share.h"
#include "lab/model/schedule.h"

namespace muster::collective::plan {
namespace {

/// Whether ranks play different roles, so that messages must be simulated one by one.
bool is_simulated(Algorithm algorithm) {
  return algorithm == Algorithm::tree || algorithm == Algorithm::chain ||
         algorithm == Algorithm::hosts;
}

/// The work of one host's ranks in a step.
struct HostStep {
  double messages = 0, host_bytes = 0, added_bytes = 0;  // of the busiest rank
  double out = 0, in = 0;                                // of the host
  bool near = false, far = false;
};

HostStep step_of(Op op, Algorithm algorithm, Crew crew, int step) {
  HostStep host;
  const int last = std::min(crew.ranks_per_host, crew.ranks);
  const auto inside = [=](int rank) { return rank < last; };
  for (int rank = 0; rank < last; ++rank) {
    const Schedule schedule(op, algorithm, rank, crew.ranks, 0);
    if (step >= schedule.steps()) continue;
    const int sends = schedule.sends(step), receives = schedule.receives(step);
    double near_bytes = 0, added = 0;
    for (int i = 0; i < sends; ++i) {
      const PlannedTransfer out = schedule.send(step, i);
      (inside(out.peer) ? host.near : host.far) = true;
      if (!inside(out.peer)) host.out += share_of(op, out.payload, crew.ranks, schedule.slices());
    }
    for (int i = 0; i < receives; ++i) {
      const PlannedTransfer in = schedule.receive(step, i);
      const double share = share_of(op, in.payload, crew.ranks, schedule.slices());
      (inside(in.peer) ? host.near : host.far) = true;
      (inside(in.peer) ? near_bytes : host.in) += share;
      if (is_added(op, in.payload)) added += share;
    }
    host.messages = std::max(host.messages, static_cast<double>(sends + receives));
    host.host_bytes = std::max(host.host_bytes, near_bytes);
    host.added_bytes = std::max(host.added_bytes, added);
  }
  return host;
}

double busy_seconds(const OperationCost& work, double bytes, const Machine& machine) {
  return work.messages * machine.overhead +
         bytes * (work.network_bytes / machine.bandwidth +
                  work.host_bytes / machine.host_bandwidth + work.added_bytes / machine.reduction);
}

/// At least one; it is empty if there is no data.
double chunks_for(double bytes, double most) { return std::max(1.0, std::ceil(bytes / most)); }

/// A tree or a chain, message by message: the time at which the last rank has its first chunk, plus
/// the work of the busiest place for each later chunk. `bytes_to(child)`: size of a chunk on the
/// way to that child.
template <class Plan, class Bytes>
double predict_down(double chunks, const Bytes& bytes_to, const Machine& machine, Crew crew) {
  const auto per_host = crew.ranks_per_host;
  std::vector<double> network(static_cast<std::size_t>((crew.ranks + per_host - 1) / per_host),
                              0);  // time from which a host's network is free
  std::vector<double> network_work(network.size(), 0);
  double end = 0, busiest = 0;
  using Arrival = std::pair<double, int>;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals;
  arrivals.emplace(0, 0);
  while (!arrivals.empty()) {
    auto [now, rank] = arrivals.top();
    arrivals.pop();
    end = std::max(end, now);
    const Plan plan{rank, crew.ranks, 0};
    double work = rank == 0 ? 0 : machine.overhead;
    for (int i = 0; i < plan.children(); ++i) {
      const int child = plan.child(i);
      const auto host = static_cast<std::size_t>(rank / per_host);
      const double far = bytes_to(child) / machine.bandwidth,
                   near = bytes_to(child) / machine.host_bandwidth;
      now += machine.overhead;
      work += machine.overhead;
      double arrival = 0;
      if (child / per_host == rank / per_host) {
        now += near;
        work += near;
        arrival = now + machine.host_latency;
      } else {
        now = std::max(now, network[host]) + far;
        network[host] = now;
        network_work[host] += far;
        arrival = now + machine.latency;
      }
      arrivals.emplace(arrival + machine.overhead, child);
    }
    busiest = std::max(busiest, work);
  }
  for (const double work : network_work) busiest = std::max(busiest, work);
  return end + (chunks - 1) * busiest;
}

template <class Plan>
double predict_broadcast(double bytes, const Machine& machine, Crew crew) {
  const double chunks = chunks_for(bytes, static_cast<double>(fixed::kFragmentBytes));
  return predict_down<Plan>(
      chunks, [=](int) { return bytes / chunks; }, machine, crew);
}

/// For a scatter. A gather sends the same messages in the opposite direction and order, and takes
/// as long.
double predict_pieces(double bytes, const Machine& machine, Crew crew) {
  const auto below = [=](int child) {
    return bytes / crew.ranks * TreePlan{child, crew.ranks, 0}.subtree();
  };
  return predict_down<TreePlan>(1, below, machine, crew);
}

double chunk_of_piece(double piece, const HostsPlan& plan) {
  return static_cast<double>(plan.chunk_bytes(static_cast<std::size_t>(piece)));
}

/// Within and between hosts, all ranks at once: the stages of the first round, plus the work of the
/// busiest place for each later round. The last host may have fewer ranks; it is counted like the
/// others.
double predict_hosts(Op op, double bytes, const Machine& machine, Crew crew) {
  const double each = crew.ranks_per_host, others = each - 1;
  const double hosts = std::ceil(crew.ranks / each), other_hosts = hosts - 1;
  const bool broadcasts = op == Op::broadcast,
             to_all = broadcasts || !info(op).reduces || op == Op::all_reduce;
  const auto first_ranks = even_hosts(crew.ranks, crew.ranks_per_host);
  const auto plan = hosts_plan_of(op, 0, crew.ranks, first_ranks, 0);
  const bool root_owns = plan.owns(0) || hosts == 1;
  const double owners = root_owns ? hosts : other_hosts;
  const double piece = bytes / (owners * each);
  const double rounds = chunks_for(piece, chunk_of_piece(piece, plan));
  const double chunk = piece / rounds;
  const double message = 2 * machine.overhead;  // both ends
  const double near = message + chunk / machine.host_bandwidth, add = chunk / machine.reduction;
  // Times of a rank's messages to its neighbours, and to other hosts: the ranks of a host share its
  // network.
  const double inside = others * owners * near, adding = others * owners * add;
  const auto away = [&](double messages) {
    return messages * (message + each * chunk / machine.bandwidth);
  };
  const auto stage = [](double work, double latency) { return work > 0 ? work + latency : 0; };
  double first = 0, network = 0, work = 0;
  if (info(op).reduces) {
    first += stage(inside + adding, machine.host_latency) +
             stage(away(other_hosts) + other_hosts * add, machine.latency);
    network += away(other_hosts);
    work += inside + adding + other_hosts * (message + add);
  }
  if (broadcasts) {
    // The root alone sends all pieces; the owners pass theirs on meanwhile.
    const double from_root = other_hosts * each * (message + chunk / machine.bandwidth);
    first += from_root + machine.latency + stage(away(other_hosts - 1), machine.latency);
    network += std::max(from_root, away(other_hosts - 1));
  } else if (to_all) {
    first += stage(away(other_hosts), machine.latency);
    network += away(other_hosts);
  } else if (op == Op::reduce) {
    // The root's network receives the chunks of all ranks of the other hosts. It sends its sums at
    // the same time; if it owns a piece, it receives sums too, and the two add up.
    const double to_root = other_hosts * each * (message + chunk / machine.bandwidth);
    first += stage(to_root, machine.latency);
    network = root_owns ? network + to_root : std::max(network, to_root);
  }
  if (to_all) {
    first += stage(inside, machine.host_latency);
    work += inside + other_hosts * message;
  }
  return first + (rounds - 1) * std::max(network, work);
}

double chunks_of(Op op, Algorithm algorithm, double bytes, int ranks) {
  if (!info(op).reduces) return 1;
  if (algorithm == Algorithm::direct) {
    const bool uses_rtr = direct_uses_rtr(static_cast<std::size_t>(bytes), ranks);
    return chunks_for(
        bytes, static_cast<double>(uses_rtr ? fixed::kEagerBytes : direct_chunk_bytes(ranks)));
  }
  const auto plan = hosts_plan_of(op, 0, ranks, {}, 0);
  return algorithm == Algorithm::slices
             ? chunks_for(bytes / plan.pieces(), chunk_of_piece(bytes / plan.pieces(), plan))
             : 1;
}

}  // namespace

double rounds_of(Op op, Algorithm algorithm, double bytes, Crew crew) {
  if (algorithm == Algorithm::tree || algorithm == Algorithm::chain)
    return op == Op::broadcast ? chunks_for(bytes, static_cast<double>(fixed::kFragmentBytes)) : 1;
  if (algorithm != Algorithm::hosts) return chunks_of(op, algorithm, bytes, crew.ranks);
  const auto first_ranks = even_hosts(crew.ranks, crew.ranks_per_host);
  const auto plan = hosts_plan_of(op, 0, crew.ranks, first_ranks, 0);
  return chunks_for(bytes / plan.pieces(), chunk_of_piece(bytes / plan.pieces(), plan));
}

OperationCost work_of(Op op, Algorithm algorithm, Crew crew) {
  OperationCost work;
  if (is_simulated(algorithm)) return work;
  const int steps = Schedule(op, algorithm, 0, crew.ranks, 0).steps();
  for (int step = 0; step < steps; ++step) {
    const HostStep host = step_of(op, algorithm, crew, step);
    if (host.far) {
      work.hops += 1;
    } else if (host.near) {
      work.host_hops += 1;
    }
    work.messages += host.messages;
    work.network_bytes += std::max(host.out, host.in);
    work.host_bytes += host.host_bytes;
    work.added_bytes += host.added_bytes;
  }
  return work;
}

double predict(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew,
               const OperationCost& work) {
  if (crew.ranks < 2) return 0;
  if (algorithm == Algorithm::tree && op != Op::broadcast)
    return predict_pieces(bytes, machine, crew);
  if (algorithm == Algorithm::tree) return predict_broadcast<TreePlan>(bytes, machine, crew);
  if (algorithm == Algorithm::chain) return predict_broadcast<ChainPlan>(bytes, machine, crew);
  // With one rank on each host, slices are the same.
  if (algorithm == Algorithm::hosts || (algorithm == Algorithm::slices && crew.ranks_per_host == 1))
    return predict_hosts(op, bytes, machine, crew);
  const double chunks = chunks_of(op, algorithm, bytes, crew.ranks);
  return work.hops * machine.latency + work.host_hops * machine.host_latency +
         chunks * busy_seconds(work, bytes / chunks, machine);
}

double predict(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew) {
  return predict(op, algorithm, bytes, machine, crew, work_of(op, algorithm, crew));
}

}  // namespace muster::collective::plan
