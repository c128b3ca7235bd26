/// The messages that a rank sends and receives in an algorithm over links, step by step. Read by
/// the tests that prove the plans and by the cost model. Computed from (rank, size) like the plans:
/// no lists, no I/O.
#pragma once

#include <variant>

#include "muster/collective/op.h"
#include "muster/collective/plan/bruck_plan.h"
#include "muster/collective/plan/hosts_plan.h"
#include "muster/collective/plan/pairwise_plan.h"
#include "muster/collective/plan/reference_plans.h"
#include "muster/collective/plan/ring_plan.h"
#include "muster/collective/plan/tree_plan.h"
#include "muster/collective/selection.h"

namespace muster::collective::plan {

/// The contents of a message, in terms of the ranks' contributions.
struct Payload {
  enum class Kind {
    token,    ///< no data: `count` ranks from `first` on have arrived
    whole,    ///< the root's data
    block,    ///< the contributions of `count` ranks from `first` on (wrapping around)
    piece,    ///< the contribution of rank `first` for its receiver
    pieces,   ///< the root's data for each of `count` ranks from `first` on (wrapping around)
    partial,  ///< slice `slice` summed over `count` ranks from `first` on; -1: all slices
    result,   ///< slice `slice`, reduced; -1: all slices
  };
  Kind kind = Kind::token;
  int first = 0;
  int count = 1;
  int slice = 0;
  bool operator==(const Payload&) const = default;
};

struct PlannedTransfer {
  int peer = -1;
  Payload payload;
};

/// The messages of a step are sent once all messages of the previous step have arrived. Every
/// pattern has
///   steps(), sends(step), send(step, index), receives(step), receive(step, index)
namespace pattern {

/// One message out and one in per step.
struct Dissemination {
  DisseminationPlan plan;
  int steps() const { return plan.steps(); }
  int sends(int) const { return 1; }
  PlannedTransfer send(int step, int) const { return {plan.target(step), known(plan.rank, step)}; }
  int receives(int) const { return 1; }
  PlannedTransfer receive(int step, int) const {
    return {plan.source(step), known(plan.source(step), step)};
  }
  Payload known(int rank, int step) const {
    return {Payload::Kind::token, wrap(rank - (1 << step) + 1, plan.size), 1 << step, 0};
  }
};

struct Bruck {
  BruckPlan plan;
  int steps() const { return plan.steps(); }
  int sends(int) const { return 1; }
  PlannedTransfer send(int step, int) const {
    return {plan.target(step), {Payload::Kind::block, plan.rank, plan.count(step), 0}};
  }
  int receives(int) const { return 1; }
  PlannedTransfer receive(int step, int) const {
    return {plan.source(step),
            {Payload::Kind::block, plan.owner(plan.distance(step)), plan.count(step), 0}};
  }
};

struct Ring {
  RingPlan plan;
  int steps() const { return plan.steps(); }
  int sends(int) const { return 1; }
  PlannedTransfer send(int step, int) const {
    return {plan.next(), {Payload::Kind::block, plan.sent_block(step), 1, 0}};
  }
  int receives(int) const { return 1; }
  PlannedTransfer receive(int step, int) const {
    return {plan.previous(), {Payload::Kind::block, plan.received_block(step), 1, 0}};
  }
};

/// Every rank sends its block to every other.
struct DirectAllGather {
  PairwisePlan plan;
  int steps() const { return plan.size > 1 ? 1 : 0; }
  int sends(int) const { return plan.steps(); }
  PlannedTransfer send(int, int index) const {
    return {plan.target(index + 1), {Payload::Kind::block, plan.rank, 1, 0}};
  }
  int receives(int) const { return plan.steps(); }
  PlannedTransfer receive(int, int index) const {
    return {plan.source(index + 1), {Payload::Kind::block, plan.source(index + 1), 1, 0}};
  }
};

/// Every rank sends a piece to every other. If slices are reduced, their owners then send the
/// results to all, to the root, or to no rank.
struct Slices {
  enum class ResultTo { none, root, all };
  PairwisePlan plan;
  ResultTo result_to;
  int root;
  int steps() const { return plan.size == 1 ? 0 : result_to == ResultTo::none ? 1 : 2; }
  int sends(int step) const {
    return step == 0 || result_to == ResultTo::all ? plan.steps() : plan.rank == root ? 0 : 1;
  }
  PlannedTransfer send(int step, int index) const {
    const int to = step == 0 || result_to == ResultTo::all ? plan.target(index + 1) : root;
    return {to, step == 0 ? piece(plan.rank) : result(plan.rank)};
  }
  int receives(int step) const {
    return step == 0 || result_to == ResultTo::all || plan.rank == root ? plan.steps() : 0;
  }
  PlannedTransfer receive(int step, int index) const {
    const int from = plan.source(index + 1);
    return {from, step == 0 ? piece(from) : result(from)};
  }
  static Payload piece(int sender) { return {Payload::Kind::piece, sender, 1, 0}; }
  static Payload result(int slice) { return {Payload::Kind::result, 0, 1, slice}; }
};

/// The ranks of a host send each other their parts of what these sum for the host; these send the
/// sums to the owners on the other hosts. The results go to the ranks at the same place on the
/// other hosts and from these to all ranks of their hosts, or directly to the root.
struct HostsReduce {
  using ResultTo = Slices::ResultTo;
  HostsPlan plan;
  ResultTo result_to;
  int root;
  int steps() const {
    return plan.size == 1 ? 0 : 2 + (result_to == ResultTo::none ? 0 : 1) + (to_all() ? 1 : 0);
  }
  int sends(int step) const {
    switch (step) {
      case 0: return (plan.per_host - 1) * plan.hosts();
      case 1: return plan.hosts() - 1;
      case 2: return to_all() ? plan.hosts() - 1 : plan.rank == root ? 0 : 1;
      default: return (plan.per_host - 1) * plan.hosts();
    }
  }
  PlannedTransfer send(int step, int index) const {
    const int to = plan.neighbour(plan.other_place(index / plan.hosts()));
    switch (step) {
      case 0: return {to, part(plan.rank, plan.rank_of(index % plan.hosts(), to % plan.per_host))};
      case 1: {
        const int peer = plan.peer(plan.other_host(index));
        return {peer, sum(plan.host(), peer)};
      }
      case 2:
        return {to_all() ? plan.peer(plan.other_host(index)) : root, Slices::result(plan.rank)};
      default: return {to, Slices::result(plan.peer(index % plan.hosts()))};
    }
  }
  int receives(int step) const {
    if (step == 2 && !to_all()) return plan.rank == root ? plan.size - 1 : 0;
    return sends(step);
  }
  PlannedTransfer receive(int step, int index) const {
    // From the nearest on, so that the received ranks are always contiguous.
    const auto nearest = [](int own, int nth) { return nth < own ? own - 1 - nth : nth + 1; };
    const int from = plan.neighbour(nearest(plan.place(), index / plan.hosts()));
    switch (step) {
      case 0: return {from, part(from, plan.peer(index % plan.hosts()))};
      case 1: {
        const int host = nearest(plan.host(), index);
        return {plan.peer(host), sum(host, plan.rank)};
      }
      case 2: {
        const int owner =
            to_all() ? plan.peer(plan.other_host(index)) : (index < root ? index : index + 1);
        return {owner, Slices::result(owner)};
      }
      default:
        return {from, Slices::result(plan.rank_of(index % plan.hosts(), from % plan.per_host))};
    }
  }

 private:
  bool to_all() const { return result_to == ResultTo::all; }
  static Payload part(int rank, int slice) { return {Payload::Kind::partial, rank, 1, slice}; }
  Payload sum(int host, int slice) const {
    return {Payload::Kind::partial, plan.rank_of(host, 0), plan.per_host, slice};
  }
};

/// Every rank sends its block to the ranks at its place on the other hosts. Each rank sends the
/// blocks of its place to the ranks of its host.
struct HostsAllGather {
  HostsPlan plan;
  int steps() const { return plan.size == 1 ? 0 : 2; }
  int sends(int step) const {
    return step == 0 ? plan.hosts() - 1 : (plan.per_host - 1) * plan.hosts();
  }
  PlannedTransfer send(int step, int index) const {
    if (step == 0) return {plan.peer(plan.other_host(index)), block(plan.rank)};
    return {plan.neighbour(plan.other_place(index / plan.hosts())),
            block(plan.peer(index % plan.hosts()))};
  }
  int receives(int step) const { return sends(step); }
  PlannedTransfer receive(int step, int index) const {
    if (step == 0) {
      const int peer = plan.peer(plan.other_host(index));
      return {peer, block(peer)};
    }
    const int place = plan.other_place(index / plan.hosts());
    return {plan.neighbour(place), block(plan.rank_of(index % plan.hosts(), place))};
  }
  static Payload block(int rank) { return {Payload::Kind::block, rank, 1, 0}; }
};

/// The root sends each rank of the other hosts one piece, which that rank sends to the ranks at its
/// place on the hosts but the root's; each sends the pieces of its place to the ranks of its host.
/// The root sends all pieces to the ranks of its own host.
struct HostsBroadcast {
  HostsPlan plan;
  int root;
  int steps() const { return plan.size == 1 ? 0 : 3; }
  int sends(int step) const {
    if (plan.rank == root) return step == 0 ? pieces() * plan.per_host : 0;
    if (near_root() || step == 0) return 0;
    return step == 1 ? forwarding_hosts() - 1 : (plan.per_host - 1) * forwarding_hosts();
  }
  PlannedTransfer send(int step, int index) const {
    if (plan.rank == root) {
      const int to = index / pieces();
      if (to == 0) return {owner(index), Slices::result(index)};
      return {plan.neighbour(plan.other_place(to - 1)), Slices::result(index % pieces())};
    }
    if (step == 1) return {other_forwarding(index), piece_of(plan.rank)};
    return {plan.neighbour(plan.other_place(index / forwarding_hosts())),
            piece_of(plan.peer(forwarding(index % forwarding_hosts())))};
  }
  int receives(int step) const {
    if (plan.rank == root) return 0;
    if (near_root()) return step == 0 ? pieces() : 0;
    return step == 0 ? 1 : sends(step);
  }
  PlannedTransfer receive(int step, int index) const {
    if (near_root()) return {root, Slices::result(index)};
    if (step == 0) return {root, piece_of(plan.rank)};
    if (step == 1) return {other_forwarding(index), piece_of(other_forwarding(index))};
    const int place = plan.other_place(index / forwarding_hosts());
    return {plan.neighbour(place),
            piece_of(plan.rank_of(forwarding(index % forwarding_hosts()), place))};
  }

 private:
  int pieces() const { return plan.broadcast_pieces(); }
  bool near_root() const { return plan.host() == plan.host_of(root); }
  int forwarding_hosts() const { return plan.hosts() - 1; }
  /// The `index`-th host without the root's.
  int forwarding(int index) const { return index < plan.host_of(root) ? index : index + 1; }
  /// The rank at this place on the `index`-th host without the root's and this rank's own.
  int other_forwarding(int index) const {
    const int own = plan.host() < plan.host_of(root) ? plan.host() : plan.host() - 1;
    return plan.peer(forwarding(index < own ? index : index + 1));
  }
  int owner(int piece) const {
    return piece < plan.host_of(root) * plan.per_host ? piece : piece + plan.per_host;
  }
  Payload piece_of(int rank) const { return Slices::result(plan.broadcast_piece(rank, root)); }
};

/// From the root down.
template <class Plan>
struct Broadcast {
  Plan plan;
  int steps() const { return 2; }
  int sends(int step) const { return step == 1 ? plan.children() : 0; }
  PlannedTransfer send(int, int index) const { return {plan.child(index), whole()}; }
  int receives(int step) const { return step == 0 && plan.parent() >= 0 ? 1 : 0; }
  PlannedTransfer receive(int, int) const { return {plan.parent(), whole()}; }
  Payload whole() const { return {Payload::Kind::whole, plan.root, 1, 0}; }
};

/// Up to the root: every rank forwards the contributions of its subtree as one message.
struct TreeGather {
  TreePlan plan;
  int steps() const { return 2; }
  int sends(int step) const { return step == 1 && plan.parent() >= 0 ? 1 : 0; }
  PlannedTransfer send(int, int) const { return {plan.parent(), blocks(plan)}; }
  int receives(int step) const { return step == 0 ? plan.children() : 0; }
  PlannedTransfer receive(int, int index) const {
    return {plan.child(index), blocks(plan.below(index))};
  }
  static Payload blocks(const TreePlan& top) {
    return {Payload::Kind::block, top.rank, top.subtree(), 0};
  }
};

/// Down from the root: every rank receives the pieces of its subtree.
struct TreeScatter {
  TreePlan plan;
  int steps() const { return 2; }
  int sends(int step) const { return step == 1 ? plan.children() : 0; }
  PlannedTransfer send(int, int index) const {
    return {plan.child(index), pieces(plan.below(index))};
  }
  int receives(int step) const { return step == 0 && plan.parent() >= 0 ? 1 : 0; }
  PlannedTransfer receive(int, int) const { return {plan.parent(), pieces(plan)}; }
  static Payload pieces(const TreePlan& top) {
    return {Payload::Kind::pieces, top.rank, top.subtree(), 0};
  }
};

/// Every rank sends its block directly to the root.
struct DirectGather {
  PairwisePlan plan;
  int root;
  int steps() const { return 1; }
  int sends(int) const { return plan.rank == root ? 0 : 1; }
  PlannedTransfer send(int, int) const { return {root, {Payload::Kind::block, plan.rank, 1, 0}}; }
  int receives(int) const { return plan.rank == root ? plan.steps() : 0; }
  PlannedTransfer receive(int, int index) const {
    return {plan.source(index + 1), {Payload::Kind::block, plan.source(index + 1), 1, 0}};
  }
};

/// The root sends every rank a piece.
struct DirectScatter {
  PairwisePlan plan;
  int root;
  int steps() const { return 1; }
  int sends(int) const { return plan.rank == root ? plan.steps() : 0; }
  PlannedTransfer send(int, int index) const {
    return {plan.target(index + 1), piece(plan.target(index + 1))};
  }
  int receives(int) const { return plan.rank == root ? 0 : 1; }
  PlannedTransfer receive(int, int) const { return {root, piece(plan.rank)}; }
  static Payload piece(int receiver) { return {Payload::Kind::pieces, receiver, 1, 0}; }
};

struct RingReduce {
  RingReducePlan plan;
  int steps() const { return plan.steps(); }
  int sends(int) const { return 1; }
  PlannedTransfer send(int step, int) const { return {plan.next(), payload(plan, step)}; }
  int receives(int) const { return 1; }
  PlannedTransfer receive(int step, int) const {
    return {plan.previous(), payload({plan.previous(), plan.size}, step)};
  }
  static Payload payload(const RingReducePlan& sender, int step) {
    const int slice = sender.sent_slice(step);
    if (!sender.sums(step)) return Slices::result(slice);
    return {Payload::Kind::partial, slice, step + 1, slice};
  }
};

struct RecursiveDoubling {
  RecursiveDoublingPlan plan;
  int steps() const { return plan.steps(); }
  int sends(int step) const { return takes_part(step, true) ? 1 : 0; }
  PlannedTransfer send(int step, int) const { return {peer(step), payload(plan, step)}; }
  int receives(int step) const { return takes_part(step, false) ? 1 : 0; }
  PlannedTransfer receive(int step, int) const {
    return {peer(step), payload({peer(step), plan.size}, step)};
  }

 private:
  bool fold(int step) const { return plan.folds() && step == 0; }
  bool unfold(int step) const { return plan.folds() && step == plan.steps() - 1; }
  bool takes_part(int step, bool sends) const {
    if (fold(step)) return plan.pair() >= 0 && plan.folded() == sends;
    if (unfold(step)) return plan.pair() >= 0 && plan.folded() != sends;
    return !plan.folded();
  }
  int peer(int step) const {
    return fold(step) || unfold(step) ? plan.pair() : plan.partner(step - (plan.folds() ? 1 : 0));
  }
  Payload payload(const RecursiveDoublingPlan& sender, int step) const {
    if (fold(step)) return {Payload::Kind::partial, sender.rank, 1, -1};
    if (unfold(step)) return Slices::result(-1);
    const int exchange = step - (plan.folds() ? 1 : 0);
    const int begin = sender.sum_begin(sender.position(), exchange);
    return {Payload::Kind::partial, begin, sender.sum_end(sender.position(), exchange) - begin, -1};
  }
};

}  // namespace pattern

using Pattern =
    std::variant<pattern::Dissemination, pattern::Bruck, pattern::Ring, pattern::DirectAllGather,
                 pattern::Slices, pattern::Broadcast<TreePlan>, pattern::Broadcast<ChainPlan>,
                 pattern::TreeGather, pattern::TreeScatter, pattern::HostsReduce,
                 pattern::HostsAllGather, pattern::HostsBroadcast, pattern::DirectGather,
                 pattern::DirectScatter, pattern::RingReduce, pattern::RecursiveDoubling>;

class Schedule {
 public:
  /// Whether `algorithm` implements `op` over links, in muster or in a reference plan.
  static bool exists(Op op, Algorithm algorithm);
  /// For an algorithm that exists. `per_host` divides `size`; only `hosts` uses it.
  Schedule(Op op, Algorithm algorithm, int rank, int size, int root, int per_host = 1);

  /// Number of slices that a reduction, or a broadcast by hosts, is cut into.
  int slices() const { return slices_; }
  int steps() const {
    return std::visit([](const auto& p) { return p.steps(); }, pattern_);
  }
  int sends(int step) const {
    return std::visit([step](const auto& p) { return p.sends(step); }, pattern_);
  }
  PlannedTransfer send(int step, int index) const {
    return std::visit([=](const auto& p) { return p.send(step, index); }, pattern_);
  }
  int receives(int step) const {
    return std::visit([step](const auto& p) { return p.receives(step); }, pattern_);
  }
  PlannedTransfer receive(int step, int index) const {
    return std::visit([=](const auto& p) { return p.receive(step, index); }, pattern_);
  }

 private:
  Pattern pattern_;
  int slices_;
};

}  // namespace muster::collective::plan
