// SPDX-License-Identifier: BSD-3-Clause
/// Reference counting of remote values: the protocol behind RRefs, without torch, threads or I/O.
/// Events go in, messages come out.
///
/// A value lives on its owner. Every other worker that refers to it holds a fork: a reference with
/// its own identity that the owner counts. The value is destroyed when the owner counts no fork and
/// no local handle. Two invariants carry the protocol:
///   1. A holder that drops its fork tells the owner (release), but only after the owner has
///      confirmed that it counts the fork.
///   2. A worker that passes a fork on keeps its own until the owner has confirmed the new one.
///
///   event                            message                        reply
///   a call creates the value         caller --create--> owner       owner --confirm--> caller
///   the owner passes it on           owner --fork--> user           none: counted when sent
///   a user passes it to the owner    user --fork--> owner           owner --accept--> user
///   a user passes it to a user       user --fork--> child           child --register--> owner,
///                                                                   owner --confirm--> child,
///                                                                   child --accept--> user
///   a fork is dropped                user --release--> owner
///   a call carrying a fork or a      sender --withdraw--> receiver  none; if it had not arrived,
///   create failed                                                   as if it had and been dropped
///   the owner cannot count the fork  owner --gone--> user           none: the value was never
///                                                                   created, or went with its last
///                                                                   holder
///
/// Messages may be late, reordered and duplicated. Each has a number per sender and receiver. The
/// receiver records the numbers seen as one counter and a few numbers beyond it, so that a
/// duplicate has no effect and memory stays bounded. Messages sent on their own are kept until
/// acknowledged, for retransmission. A create and a fork travel inside a call; if the call fails,
/// its maker reports `lost`.
///
/// A worker's death removes its forks and its values; references to those values fail with an error
/// that names it. If a giver dies after passing on a reference that the owner has not confirmed,
/// the reference may arrive too late; it then fails in the same way. A confirmed reference is never
/// lost while its owner lives.
///
/// Based on the remote reference protocol of torch.distributed.rpc; differs in message numbers,
/// withdrawal and the naming of deaths.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/status.h"

namespace muster::rpc {

/// Identifies a value. The creator numbers the values it creates on each owner.
struct RRefId {
  std::int32_t creator = -1;
  std::int32_t owner = -1;
  std::uint64_t number = 0;
  friend auto operator<=>(const RRefId&, const RRefId&) = default;
};

/// Identifies a reference held outside the owner. Numbered per maker and holder.
struct ForkId {
  std::int32_t maker = -1;
  std::int32_t holder = -1;
  std::uint64_t number = 0;
  friend auto operator<=>(const ForkId&, const ForkId&) = default;
};

/// A reference held by a worker: a fork, or without one a handle on the owner itself.
struct RRefReference {
  RRefId rref;
  std::optional<ForkId> fork = {};
  friend auto operator<=>(const RRefReference&, const RRefReference&) = default;
};

enum class RRefMessageKind : std::uint8_t {
  create,
  fork,
  register_fork,
  confirm,
  gone,
  accept,
  release,
  withdraw
};
inline constexpr std::uint8_t kRRefMessageKinds = 8;

struct RRefMessage {
  std::int32_t from = -1;
  std::int32_t to = -1;
  std::uint64_t number = 0;
  RRefMessageKind kind = RRefMessageKind::create;
  RRefId rref;
  ForkId fork;
  bool counted = false;            ///< fork: sent by the owner, which already counts it
  RRefMessageKind withdrawn = {};  ///< withdraw: kind and number of the message to withdraw
  std::uint64_t withdrawn_number = 0;
  std::string reason = {};  ///< gone: the reason
  friend auto operator<=>(const RRefMessage&, const RRefMessage&) = default;
};

std::string encode(const RRefMessage& message);
/// Checks the encoding only; the receiving ledger checks the content.
Result<RRefMessage> decode_rref_message(std::string_view bytes);

/// The set of numbers seen: all up to a counter, and some beyond.
class SeenNumbers {
 public:
  /// Records `number` (from 1); returns whether it is new.
  bool first(std::uint64_t number);
  bool contains(std::uint64_t number) const {
    return number <= all_up_to_ || beyond_.contains(number);
  }
  std::string text() const;

 private:
  std::uint64_t all_up_to_ = 0;
  std::set<std::uint64_t> beyond_;
};

/// Actions to carry out, in any order.
struct RRefEffects {
  std::vector<RRefMessage> send;  ///< to be sent on their own until acknowledged
  std::vector<RRefId> drop;       ///< values here without references
  std::vector<ForkId> confirmed;  ///< forks here that the owner now counts
  /// References here that have failed permanently; still to be dropped.
  std::vector<std::pair<RRefReference, Status>> failed;
};

/// Dead workers and the causes.
class DeadWorkers {
 public:
  /// Returns false if already known.
  bool add(std::int32_t worker, const Status& cause) { return all_.emplace(worker, cause).second; }
  bool contains(std::int32_t worker) const { return all_.contains(worker); }
  /// Ok while it lives.
  Status cause(std::int32_t worker) const {
    const auto found = all_.find(worker);
    return found == all_.end() ? Status() : found->second;
  }
  /// "; <cause>" for each dead worker.
  std::string causes() const;
  const std::map<std::int32_t, Status>& all() const { return all_; }

 private:
  std::map<std::int32_t, Status> all_;
};

/// One worker's ledger. Not thread-safe. A value type: tests copy it at every step.
class RRefLedger {
 public:
  explicit RRefLedger(std::int32_t self) : self_(self) {}

  // Actions of the application. After each of these and each event below, `take_effects` returns
  // the resulting effects.

  /// Creates a value owned by this worker, with one handle.
  RRefReference create_here();
  struct Created {
    RRefReference reference;
    RRefMessage message;  ///< to be sent with the call that creates the value
  };
  /// Prepares a value to be created by a call to `owner`. Fails if `owner` is dead.
  Result<Created> create_at(std::int32_t owner);
  /// Makes a reference for worker `to`, possibly this one, to be sent inside a call or a reply.
  /// Fails if the reference has failed or `to` is dead.
  Result<RRefMessage> fork(const RRefReference& held, std::int32_t to);
  /// Drops a reference created or received here. Does nothing for an unknown one, as after
  /// `drop_forks`.
  void drop(const RRefReference& held);
  /// Drops all forks the application still holds, at the end of the job.
  void drop_forks();

  // Events.

  struct Received {
    /// The reference now held; for a create, the owner's handle for the call that creates the
    /// value.
    RRefReference reference;
    Status status;  ///< why it is unusable, if already known
  };
  /// Receives `message`. Returns a reference for the first arrival of a create or a fork. Fails,
  /// changing nothing, if the message is invalid: the sender has another version or lies.
  Result<std::optional<Received>> receive(const RRefMessage& message);
  /// `peer` has processed message `number`.
  void acknowledged(std::int32_t peer, std::uint64_t number);
  /// Retransmits unacknowledged messages.
  void resend();
  /// The call that carried this create or fork has failed; the message may or may not have arrived.
  void lost(const RRefMessage& message);
  /// All calls are over: withdraws, once each, forks passed on but not accepted, which may have
  /// been in a reply that was never read.
  void withdraw_passed_on();
  /// `cause` names the worker. Later messages from it are ignored.
  void worker_died(std::int32_t worker, const Status& cause);

  RRefEffects take_effects() { return std::exchange(effects_, {}); }

  // Queries.

  /// Ok, also for an unconfirmed fork; otherwise why the reference is unusable.
  Status state(const RRefReference& held) const;
  /// Whether the owner counts it; always true on the owner.
  bool confirmed(const RRefReference& held) const;
  /// True if nothing is held, owned or awaited.
  bool empty() const;
  /// True if no fork is held here and no message is unacknowledged: the condition for the end of a
  /// job after all forks have been dropped.
  bool forks_settled() const { return forks_.empty() && unacknowledged_.empty(); }
  std::size_t owned() const { return owned_.size(); }
  /// Whether a value owned here exists or may still be created: other workers may hear of it and
  /// ask for it before the call that creates it arrives.
  bool expects(const RRefId& rref) const {
    return owned_.contains(rref) || (!was_created(rref) && !dead_.contains(rref.creator));
  }
  /// Workers whose forks keep values here alive, or whose replies forks here wait for.
  std::set<std::int32_t> waiting_for() const;
  /// The whole state as text: equal texts mean equal states.
  std::string text() const;

 private:
  /// unconfirmed -> confirmed, by the owner; either -> failed, for good. A fork is erased once its
  /// holder has dropped it, its children are accepted and it is no longer unconfirmed: that keeps
  /// both invariants.
  enum class ForkState : std::uint8_t { unconfirmed, confirmed, failed };
  struct Owned {
    bool created = false;  // false: others know of it before the call that creates it has arrived
    int handles = 0;  // references on this worker, including those in transit from here to here
    std::set<ForkId> forks;    // counted forks
    std::set<ForkId> waiting;  // to be confirmed once the value is created
  };
  struct Fork {
    RRefId rref;
    std::optional<std::int32_t> parent;  // worker that waits for this fork's confirmation
    ForkState state = ForkState::unconfirmed;
    bool held = true;
    std::set<ForkId> children;  // passed on, not yet accepted
    Status failure = {};
  };

  RRefMessage numbered(std::int32_t to, RRefMessageKind kind, const RRefId& rref,
                       const ForkId& fork);
  void send(RRefMessage message);
  void send(std::int32_t to, RRefMessageKind kind, const RRefId& rref, const ForkId& fork) {
    send(numbered(to, kind, rref, fork));
  }
  bool was_created(const RRefId& rref) const;
  Status malformed(const RRefMessage& message, const char* what) const;
  Status check(const RRefMessage& message) const;

  std::optional<Received> on_create(const RRefMessage& message);
  std::optional<Received> on_fork(const RRefMessage& message);
  void on_register(const RRefMessage& message);
  void on_answer(const RRefMessage& message);
  void on_accept(const RRefMessage& message);
  void on_release(const RRefMessage& message);
  void on_withdraw(const RRefMessage& message);

  void send_gone(const RRefId& rref, const ForkId& fork, std::string reason);
  void accept(Fork& fork, const ForkId& id);
  void fail_uncreated(std::map<RRefId, Owned>::iterator entry, const std::string& reason);
  void fail_fork(const ForkId& id, Fork& fork, Status failure);
  void settle_owned(const RRefId& rref);
  void settle_fork(const ForkId& id);

  std::int32_t self_;
  std::map<RRefId, Owned> owned_;
  std::map<ForkId, Fork> forks_;
  struct PassedOn {
    ForkId parent;
    std::uint64_t message = 0;
    bool withdrawn = false;
  };
  std::map<ForkId, PassedOn> passed_on_;  // passed on from forks here, not yet accepted
  std::map<std::int32_t, std::uint64_t> next_message_, next_rref_,
      next_fork_;                                                   // per receiver, owner, holder
  std::map<std::int32_t, SeenNumbers> messages_seen_, rrefs_seen_;  // per sender, creator
  std::map<std::pair<std::int32_t, std::uint64_t>, RRefMessage> unacknowledged_;
  DeadWorkers dead_;
  RRefEffects effects_;
};

}  // namespace muster::rpc
