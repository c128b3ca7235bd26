/// Who keeps a remote value alive: the protocol behind RRefs, free of torch, threads and I/O.
/// Events go in, messages come out.
///
/// A value lives on its owner. Whoever else refers to it holds a fork: a reference with an identity
/// of its own that the owner counts. The value goes when the owner counts no fork and no local
/// handle any more. Two promises carry everything:
///   1. a holder that lets its fork go tells the owner (release), and only after the owner has
///       confirmed that it counts the fork;
///   2. whoever passes a fork on to another worker keeps its own until the new one is confirmed by
///      the owner.
///
///   what happens                     message                        what answers it
///   the value is made by a call      caller --create--> owner       owner --confirm--> caller
///   the owner passes it on           owner --fork--> user           counted when sent: nothing
///   a user passes it to the owner    user --fork--> owner           owner --accept--> user
///   a user passes it to a user       user --fork--> child           child --register--> owner,
///                                                                   owner --confirm--> child,
///                                                                   child --accept--> user
///   a fork is let go                 user --release--> owner
///   a call with a fork or a create   sender --withdraw--> receiver  as if the fork had come and
///   in it failed: did it arrive?                                    been let go where it had not
///                                                                   come; else not at all
///   the owner cannot count the fork  owner --gone--> user           (the value was never made, or
///                                                                   went with its last holder)
///
/// Messages may be late, overtake each other and come several times. Each bears a number of its
/// sender and receiver; the receiver keeps the numbers that it has seen as one counter and the few
/// beyond it, so that a second delivery changes nothing and memory stays flat. Messages that travel
/// alone are kept until acknowledged, to be sent again. A create and a fork travel inside a call;
/// whoever made the call says `lost` where it failed.
///
/// A worker's death takes its forks with it, and its values: references to those fail by name. A
/// reference that its giver had passed on and the owner had not confirmed when the giver died may
/// be too late; it then fails by name too. A confirmed one is never lost while its owner lives.
///
/// After the remote reference protocol of torch.distributed.rpc, from which it differs in the
/// numbers, in withdrawal and in naming deaths.
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

#include "muster/base/status.h"

namespace muster::rpc {

/// A value. The creator numbers those that it makes on each owner.
struct RRefId {
  std::int32_t creator = -1;
  std::int32_t owner = -1;
  std::uint64_t number = 0;
  friend auto operator<=>(const RRefId&, const RRefId&) = default;
};

/// A reference on another worker than the owner. Numbered per maker and holder.
struct ForkId {
  std::int32_t maker = -1;
  std::int32_t holder = -1;
  std::uint64_t number = 0;
  friend auto operator<=>(const ForkId&, const ForkId&) = default;
};

/// What a worker holds: a fork, or without one a handle on the owner itself.
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
  bool counted = false;            ///< fork: the owner has sent it and counts it already
  RRefMessageKind withdrawn = {};  ///< withdraw: what did not arrive, and its number
  std::uint64_t withdrawn_number = 0;
  std::string reason = {};  ///< gone: a sentence
  friend auto operator<=>(const RRefMessage&, const RRefMessage&) = default;
};

std::string encode(const RRefMessage& message);
/// Checks form only; what the message says is checked by the ledger that receives it.
Result<RRefMessage> decode_rref_message(std::string_view bytes);

/// Numbers seen so far: all up to one, and some beyond.
class SeenNumbers {
 public:
  /// Whether `number` (from 1 on) comes for the first time.
  bool first(std::uint64_t number);
  bool contains(std::uint64_t number) const {
    return number <= all_up_to_ || beyond_.contains(number);
  }
  std::string text() const;

 private:
  std::uint64_t all_up_to_ = 0;
  std::set<std::uint64_t> beyond_;
};

/// What is to be done, in any order.
struct RRefEffects {
  std::vector<RRefMessage> send;  ///< alone; until acknowledged
  std::vector<RRefId> drop;       ///< values here that nobody refers to any more
  std::vector<ForkId> confirmed;  ///< forks here that the owner counts from now on
  std::vector<std::pair<RRefReference, Status>>
      failed;  ///< references here that will never be good again; still to be let go
};

/// The workers that have died, and why.
class DeadWorkers {
 public:
  /// False where that was known.
  bool add(std::int32_t worker, const Status& cause) { return all_.emplace(worker, cause).second; }
  bool contains(std::int32_t worker) const { return all_.contains(worker); }
  /// Success while it lives.
  Status cause(std::int32_t worker) const {
    const auto found = all_.find(worker);
    return found == all_.end() ? Status() : found->second;
  }
  /// "; <cause>" for each.
  std::string causes() const;
  const std::map<std::int32_t, Status>& all() const { return all_; }

 private:
  std::map<std::int32_t, Status> all_;
};

/// One worker's part. Not thread-safe. A value type: tests copy it at every step.
class RRefLedger {
 public:
  explicit RRefLedger(std::int32_t self) : self_(self) {}

  // What the application does. After each call, and each event below, `take_effects` has what
  // follows from it.

  /// A value made here by its owner, with one handle.
  RRefReference create_here();
  struct Created {
    RRefReference reference;
    RRefMessage message;  ///< to travel with the call that makes the value
  };
  /// A value to be made by a call to another worker. Fails where that has died.
  Result<Created> create_at(std::int32_t owner);
  /// A reference for worker `to` (any, also this one), to travel inside a call or a reply. Fails
  /// where the reference has, or `to` has died.
  Result<RRefMessage> fork(const RRefReference& held, std::int32_t to);
  /// Lets go of a reference that was created or received here. Of none that is unknown: after
  /// `drop_forks` nothing is left to let go.
  void drop(const RRefReference& held);
  /// Lets go of all forks that the application still holds: the end of the job.
  void drop_forks();

  // What happens.

  struct Received {
    RRefReference reference;  ///< held from now on; of a create: the owner's handle for the call
                              ///< that makes the value
    Status status;            ///< why it is of no use, where that is known already
  };
  /// `message` has come. A reference where it is a create or a fork that comes for the first time.
  /// A failure where the message makes no sense: the sender is of another version or lies; nothing
  /// has changed.
  Result<std::optional<Received>> receive(const RRefMessage& message);
  /// `peer` has taken message `number`.
  void acknowledged(std::int32_t peer, std::uint64_t number);
  /// Sends again what has not been acknowledged.
  void resend();
  /// The call that carried this create or fork has failed, and may or may not have arrived.
  void lost(const RRefMessage& message);
  /// All calls are over: what was passed on and has not been accepted may have come in an answer
  /// that nobody read. Once for each.
  void withdraw_passed_on();
  /// `cause` says who, in a sentence. What still comes from there is not listened to.
  void worker_died(std::int32_t worker, const Status& cause);

  RRefEffects take_effects() { return std::exchange(effects_, {}); }

  // Questions.

  /// Success, also for a fork that waits for its confirmation; else why the reference is of no use.
  Status state(const RRefReference& held) const;
  /// Whether the owner counts it; always true on the owner.
  bool confirmed(const RRefReference& held) const;
  /// Nothing is held, owned or waited for.
  bool empty() const;
  /// No fork is held here and no message is on its way: what the end of a job waits for, once all
  /// forks have been let go.
  bool forks_settled() const { return forks_.empty() && unacknowledged_.empty(); }
  std::size_t owned() const { return owned_.size(); }
  /// Whether a value of this worker is there or may still come: others may hear of it, and ask for
  /// it, before the call that makes it is here.
  bool expects(const RRefId& rref) const {
    return owned_.contains(rref) || (!was_created(rref) && !dead_.contains(rref.creator));
  }
  /// Workers whose forks keep values here alive, or whose answers forks here wait for.
  std::set<std::int32_t> waiting_for() const;
  /// All of the state as text: equal texts, equal states.
  std::string text() const;

 private:
  enum class ForkState : std::uint8_t { unconfirmed, confirmed, failed };
  struct Owned {
    bool created = false;    // false: others know of it before the call that makes it has come
    int handles = 0;         // references on this worker, also those on their way from here to here
    std::set<ForkId> forks;  // counted
    std::set<ForkId> waiting;  // to be confirmed once the value is created
  };
  struct Fork {
    RRefId rref;
    std::optional<std::int32_t> parent;  // who waits to hear that this fork is confirmed
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
  std::map<ForkId, PassedOn> passed_on_;  // from forks here, and not yet accepted
  std::map<std::int32_t, std::uint64_t> next_message_, next_rref_,
      next_fork_;                                                   // per receiver, owner, holder
  std::map<std::int32_t, SeenNumbers> messages_seen_, rrefs_seen_;  // per sender, creator
  std::map<std::pair<std::int32_t, std::uint64_t>, RRefMessage> unacknowledged_;
  DeadWorkers dead_;
  RRefEffects effects_;
};

}  // namespace muster::rpc
