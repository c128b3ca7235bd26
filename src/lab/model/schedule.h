// SPDX-License-Identifier: BSD-3-Clause
/// The messages that a rank sends and receives in an algorithm over links, step by step. Read by
/// the tests that prove the plans and by the cost model. Computed from (rank, size) like the plans:
/// no lists, no I/O.
#pragma once

#include <algorithm>
#include <span>
#include <variant>

#include "core/collective/op.h"
#include "core/collective/plan/hosts_plan.h"
#include "core/collective/plan/plan.h"
#include "core/collective/select/selection.h"
#include "lab/model/reference_plans.h"

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
  static Payload result(int slice) { return {Kind::result, 0, 1, slice}; }
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

/// Every rank sends its block, or a piece, to every other.
struct DirectExchange {
  PairwisePlan plan;
  Payload::Kind kind;
  int steps() const { return plan.size > 1 ? 1 : 0; }
  int sends(int) const { return plan.steps(); }
  PlannedTransfer send(int, int index) const {
    return {plan.target(index + 1), {kind, plan.rank, 1, 0}};
  }
  int receives(int) const { return plan.steps(); }
  PlannedTransfer receive(int, int index) const {
    return {plan.source(index + 1), {kind, plan.source(index + 1), 1, 0}};
  }
};

/// The messages of a host's ranks to each other about all pieces that a plan's hosts own: one to
/// each of the others for every piece that the sender, or the receiver, handles.
struct WithinHost {
  struct PieceTransfer {
    int neighbour;
    int owner;
  };
  const HostsPlan& plan;
  int others() const { return plan.ranks_here() - 1; }
  int handled_here() const { return others() * plan.handled(); }
  /// About the pieces that this rank handles, with the neighbour that is `nth` in some order.
  template <class Order>
  PieceTransfer here(int index, Order nth) const {
    return {plan.neighbour(nth(index % others())), plan.handled(index / others())};
  }
  int handled_there() const { return plan.pieces() - plan.handled(); }
  /// About the pieces that the neighbour handles.
  PieceTransfer there(int index) const {
    const int place = plan.other_place(index % others());
    return {plan.neighbour(place), plan.handled_by(place, index / others())};
  }
};

/// The ranks of a host send each other their parts of what these sum for the host; these send the
/// sums to the owners on the other hosts. The results go to the ranks that handle them on the other
/// hosts and from these to all ranks of their hosts, or directly to the root.
struct HostsReduce {
  enum class ResultTo { none, root, all };
  HostsPlan plan;
  ResultTo result_to;
  int root;
  int steps() const {
    return plan.size == 1 ? 0 : 2 + (result_to == ResultTo::none ? 0 : 1) + (to_all() ? 1 : 0);
  }
  int sends(int step) const {
    switch (step) {
      case 0: return within().handled_there();
      case 1: return plan.handled_elsewhere();
      case 2: return to_all() ? plan.hosts() - 1 : plan.rank == root || !owns() ? 0 : 1;
      default: return within().handled_here();
    }
  }
  PlannedTransfer send(int step, int index) const {
    switch (step) {
      case 0: {
        const auto [to, owner] = within().there(index);
        return {to, part(plan.rank, owner)};
      }
      case 1: {
        const int owner = plan.handled_elsewhere(index);
        return {owner, sum(plan.host(), owner)};
      }
      case 2: {
        const int to = to_all() ? plan.handler(plan.other_host(index), plan.rank) : root;
        return {to, result(plan.rank)};
      }
      default: {
        const auto [to, owner] =
            within().here(index, [this](int nth) { return plan.other_place(nth); });
        return {to, result(owner)};
      }
    }
  }
  int receives(int step) const {
    switch (step) {
      case 0: return within().handled_here();
      case 1: return owns() ? plan.hosts() - 1 : 0;
      case 2: return to_all() ? plan.handled_elsewhere() : plan.rank == root ? other_owners() : 0;
      default: return within().handled_there();
    }
  }
  PlannedTransfer receive(int step, int index) const {
    // From the nearest on, so that the received ranks are always contiguous.
    const auto nearest = [](int own, int nth) { return nth < own ? own - 1 - nth : nth + 1; };
    switch (step) {
      case 0: {
        const auto [from, owner] =
            within().here(index, [&](int nth) { return nearest(plan.place(), nth); });
        return {from, part(from, owner)};
      }
      case 1: {
        const int host = nearest(plan.host(), index);
        return {plan.handler(host, plan.rank), sum(host, plan.rank)};
      }
      case 2: {
        const int owner = to_all() ? plan.handled_elsewhere(index) : other_owner(index);
        return {owner, result(owner)};
      }
      default: {
        const auto [from, owner] = within().there(index);
        return {from, result(owner)};
      }
    }
  }

 private:
  bool to_all() const { return result_to == ResultTo::all; }
  bool owns() const { return plan.owns(plan.host()); }
  int other_owners() const { return plan.pieces() - (owns() ? 1 : 0); }
  int other_owner(int index) const {
    return plan.owner_of(!owns() || index < plan.piece_of(plan.rank) ? index : index + 1);
  }
  WithinHost within() const { return {plan}; }
  Payload part(int rank, int owner) const {
    return {Payload::Kind::partial, rank, 1, plan.piece_of(owner)};
  }
  Payload sum(int host, int owner) const {
    return {Payload::Kind::partial, plan.first(host), plan.ranks_on(host), plan.piece_of(owner)};
  }
  Payload result(int owner) const { return Payload::result(plan.piece_of(owner)); }
};

/// Every rank sends its block to the ranks that handle it on the other hosts. Each rank sends the
/// blocks that it handles to the ranks of its host.
struct HostsAllGather {
  HostsPlan plan;
  int steps() const { return plan.size == 1 ? 0 : 2; }
  int sends(int step) const {
    return step == 0 ? plan.hosts() - 1 : WithinHost{plan}.handled_here();
  }
  PlannedTransfer send(int step, int index) const {
    if (step == 0) return {plan.handler(plan.other_host(index), plan.rank), block(plan.rank)};
    const auto [to, owner] =
        WithinHost{plan}.here(index, [this](int nth) { return plan.other_place(nth); });
    return {to, block(owner)};
  }
  int receives(int step) const {
    return step == 0 ? plan.handled() - 1 : WithinHost{plan}.handled_there();
  }
  PlannedTransfer receive(int step, int index) const {
    if (step == 0) {
      const int owner = plan.handled_elsewhere(index);
      return {owner, block(owner)};
    }
    const auto [from, owner] = WithinHost{plan}.there(index);
    return {from, block(owner)};
  }
  static Payload block(int rank) { return {Payload::Kind::block, rank, 1, 0}; }
};

/// The root sends each rank of the other hosts one piece, which that rank sends to the ranks that
/// handle it on the hosts but the root's; each sends the pieces that it handles to the ranks of its
/// host. The root sends all pieces to the ranks of its own host.
struct HostsBroadcast {
  HostsPlan plan;
  int root;
  int steps() const { return plan.size == 1 ? 0 : 3; }
  int sends(int step) const {
    if (plan.rank == root) return step == 0 ? plan.pieces() * plan.ranks_here() : 0;
    if (near_root() || step == 0) return 0;
    return step == 1 ? plan.hosts() - 2 : WithinHost{plan}.handled_here();
  }
  PlannedTransfer send(int step, int index) const {
    if (plan.rank == root) {
      const int to = index / plan.pieces(), piece = index % plan.pieces();
      return {to == 0 ? plan.owner_of(piece) : plan.neighbour(plan.other_place(to - 1)),
              Payload::result(piece)};
    }
    if (step == 1) return {plan.handler(forwarding_host(index), plan.rank), piece_of(plan.rank)};
    const auto [to, owner] =
        WithinHost{plan}.here(index, [this](int nth) { return plan.other_place(nth); });
    return {to, piece_of(owner)};
  }
  int receives(int step) const {
    if (plan.rank == root) return 0;
    if (near_root()) return step == 0 ? plan.pieces() : 0;
    return step == 0 ? 1 : step == 1 ? plan.handled() - 1 : WithinHost{plan}.handled_there();
  }
  PlannedTransfer receive(int step, int index) const {
    if (near_root()) return {root, Payload::result(index)};
    if (step == 0) return {root, piece_of(plan.rank)};
    if (step == 1) return {plan.handled_elsewhere(index), piece_of(plan.handled_elsewhere(index))};
    const auto [from, owner] = WithinHost{plan}.there(index);
    return {from, piece_of(owner)};
  }

 private:
  bool near_root() const { return !plan.owns(plan.host()); }
  /// The `index`-th host without the root's and this rank's own.
  int forwarding_host(int index) const {
    const int near = plan.host_of(root), own = plan.host();
    index += index >= std::min(near, own) ? 1 : 0;
    return index + (index >= std::max(near, own) ? 1 : 0);
  }
  Payload piece_of(int rank) const { return Payload::result(plan.piece_of(rank)); }
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
    if (!sender.sums(step)) return Payload::result(slice);
    return {Payload::Kind::partial, slice, step + 1, slice};
  }
};

}  // namespace pattern

using Pattern =
    std::variant<pattern::Dissemination, pattern::Bruck, pattern::Ring, pattern::DirectExchange,
                 pattern::Broadcast<TreePlan>, pattern::Broadcast<ChainPlan>, pattern::TreeGather,
                 pattern::TreeScatter, pattern::HostsReduce, pattern::HostsAllGather,
                 pattern::HostsBroadcast, pattern::DirectGather, pattern::DirectScatter,
                 pattern::RingReduce>;

class Schedule {
 public:
  /// Whether `algorithm` implements `op` over links, in muster or in a reference plan.
  static bool exists(Op op, Algorithm algorithm);
  /// For an algorithm that exists. Only `hosts` uses the first ranks of the hosts, which the
  /// schedule does not own (see `HostsPlan`).
  Schedule(Op op, Algorithm algorithm, int rank, int size, int root,
           std::span<const int> first_ranks = {});

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
