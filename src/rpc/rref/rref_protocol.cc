// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/rref/rref_protocol.h"

#include <sstream>

#include "core/base/bytes.h"

namespace muster::rpc {
namespace {

constexpr const char* kKindNames[kRRefMessageKinds] = {"create", "fork",   "register", "confirm",
                                                       "gone",   "accept", "release",  "withdraw"};

std::string to_text(const RRefId& id) {
  return std::to_string(id.creator) + ">" + std::to_string(id.owner) + "#" +
         std::to_string(id.number);
}
std::string to_text(const ForkId& id) {
  return std::to_string(id.maker) + "/" + std::to_string(id.holder) + "#" +
         std::to_string(id.number);
}
template <class Ids>
std::string to_text_all(const Ids& ids) {
  std::string text;
  for (const auto& id : ids) {
    if (!text.empty()) text += ",";
    text += to_text(id);
  }
  return text;
}

template <class Id>
void put(ByteWriter& out, const Id& id) {
  if constexpr (std::is_same_v<Id, RRefId>) {
    out.put(id.creator).put(id.owner).put(id.number);
  } else {
    out.put(id.maker).put(id.holder).put(id.number);
  }
}

}  // namespace

std::string encode(const RRefMessage& message) {
  ByteWriter out;
  out.put(message.from).put(message.to).put(message.number).put(message.kind);
  put(out, message.rref);
  put(out, message.fork);
  out.put(static_cast<std::uint8_t>(message.counted))
      .put(message.withdrawn)
      .put(message.withdrawn_number)
      .put_text(message.reason);
  return out.take();
}

Result<RRefMessage> decode_rref_message(std::string_view bytes) {
  ByteReader in(bytes);
  RRefMessage message;
  message.from = in.get<std::int32_t>();
  message.to = in.get<std::int32_t>();
  message.number = in.get<std::uint64_t>();
  const auto kind = in.get<std::uint8_t>();
  message.rref.creator = in.get<std::int32_t>();
  message.rref.owner = in.get<std::int32_t>();
  message.rref.number = in.get<std::uint64_t>();
  message.fork.maker = in.get<std::int32_t>();
  message.fork.holder = in.get<std::int32_t>();
  message.fork.number = in.get<std::uint64_t>();
  const auto counted = in.get<std::uint8_t>();
  const auto withdrawn = in.get<std::uint8_t>();
  message.withdrawn_number = in.get<std::uint64_t>();
  message.reason = std::string(in.get_text());
  if (!in.at_end() || kind >= kRRefMessageKinds || withdrawn >= kRRefMessageKinds || counted > 1) {
    return Status(Code::refused, "a message about a remote reference is malformed (" +
                                     std::to_string(bytes.size()) +
                                     " bytes); do all workers run the same version?");
  }
  message.kind = static_cast<RRefMessageKind>(kind);
  message.counted = counted == 1;
  message.withdrawn = static_cast<RRefMessageKind>(withdrawn);
  return message;
}

bool SeenNumbers::first(std::uint64_t number) {
  if (contains(number)) return false;
  beyond_.insert(number);
  while (!beyond_.empty() && *beyond_.begin() == all_up_to_ + 1) {
    ++all_up_to_;
    beyond_.erase(beyond_.begin());
  }
  return true;
}

std::string SeenNumbers::text() const {
  std::ostringstream out;
  out << all_up_to_;
  for (const auto number : beyond_) out << "+" << number;
  return std::move(out).str();
}

RRefMessage RRefLedger::numbered(std::int32_t to, RRefMessageKind kind, const RRefId& rref,
                                 const ForkId& fork) {
  RRefMessage message;
  message.from = self_;
  message.to = to;
  message.number = ++next_message_[to];
  message.kind = kind;
  message.rref = rref;
  message.fork = fork;
  return message;
}

void RRefLedger::send(RRefMessage message) {
  if (dead_.contains(message.to)) return;
  unacknowledged_.emplace(std::pair(message.to, message.number), message);
  effects_.send.push_back(std::move(message));
}

bool RRefLedger::was_created(const RRefId& rref) const {
  if (rref.creator == self_) {
    const auto next = next_rref_.find(self_);
    return next != next_rref_.end() && rref.number <= next->second;
  }
  const auto seen = rrefs_seen_.find(rref.creator);
  return seen != rrefs_seen_.end() && seen->second.contains(rref.number);
}

RRefReference RRefLedger::create_here() {
  const RRefId rref{self_, self_, ++next_rref_[self_]};
  owned_[rref] = {.created = true, .handles = 1, .forks = {}, .waiting = {}};
  return {rref};
}

Result<RRefLedger::Created> RRefLedger::create_at(std::int32_t owner) {
  if (Status cause = dead_.cause(owner); !cause) return cause;
  if (owner == self_)
    return Status(Code::internal, "a value of this worker itself is made with create_here");
  const RRefId rref{self_, owner, ++next_rref_[owner]};
  const ForkId fork{self_, self_, ++next_fork_[self_]};
  forks_[fork] = {.rref = rref, .parent = {}, .children = {}};
  return Created{{rref, fork}, numbered(owner, RRefMessageKind::create, rref, fork)};
}

Result<RRefMessage> RRefLedger::fork(const RRefReference& held, std::int32_t to) {
  if (Status status = state(held); !status.ok()) return status;
  if (Status cause = dead_.cause(to); !cause) return cause;
  const ForkId child{self_, to, ++next_fork_[to]};
  if (held.fork) {
    forks_.at(*held.fork).children.insert(child);
    RRefMessage message = numbered(to, RRefMessageKind::fork, held.rref, child);
    passed_on_.emplace(child, PassedOn{*held.fork, message.number});
    return message;
  }
  Owned& owned = owned_.at(held.rref);
  if (to == self_) {
    ++owned.handles;
  } else {
    owned.forks.insert(child);
  }
  RRefMessage message = numbered(to, RRefMessageKind::fork, held.rref, child);
  message.counted = owned.created;
  return message;
}

void RRefLedger::drop(const RRefReference& held) {
  if (!held.fork) {
    const auto owned = owned_.find(held.rref);
    if (owned == owned_.end() || owned->second.handles == 0) return;
    --owned->second.handles;
    return settle_owned(held.rref);
  }
  const auto fork = forks_.find(*held.fork);
  if (fork == forks_.end()) return;
  fork->second.held = false;
  settle_fork(*held.fork);
}

void RRefLedger::drop_forks() {
  std::vector<ForkId> held;
  for (const auto& [id, fork] : forks_) {
    if (fork.held) held.push_back(id);
  }
  for (const ForkId& id : held) drop({forks_.at(id).rref, id});
}

Status RRefLedger::malformed(const RRefMessage& message, const char* what) const {
  return Status(Code::refused,
                "worker " + std::to_string(self_) + " got a " +
                    kKindNames[static_cast<std::size_t>(message.kind)] +
                    " message about remote reference " + to_text(message.rref) + " from worker " +
                    std::to_string(message.from) + " that " + what +
                    "; do all workers run the same version?",
                {message.from});
}

// Checks what is true of every valid message, independent of the ledger's state.
Status RRefLedger::check(const RRefMessage& message) const {
  const auto& [rref, fork] = std::pair(message.rref, message.fork);
  if (message.to != self_) return malformed(message, "is for another worker");
  if (message.number == 0 || rref.number == 0 || fork.number == 0)
    return malformed(message, "bears no number");
  bool fits = true;
  switch (message.kind == RRefMessageKind::withdraw ? message.withdrawn : message.kind) {
    case RRefMessageKind::create:
      fits = rref.owner == self_ && rref.creator == message.from && fork.holder == message.from;
      break;
    case RRefMessageKind::fork: fits = fork.maker == message.from && fork.holder == self_; break;
    case RRefMessageKind::register_fork:
    case RRefMessageKind::release: fits = rref.owner == self_ && fork.holder == message.from; break;
    case RRefMessageKind::confirm:
    case RRefMessageKind::gone: fits = rref.owner == message.from && fork.holder == self_; break;
    case RRefMessageKind::accept: fits = fork.maker == self_ && fork.holder == message.from; break;
    case RRefMessageKind::withdraw: fits = false; break;
  }
  if (fits && message.kind == RRefMessageKind::withdraw)
    fits =
        message.withdrawn == RRefMessageKind::create || message.withdrawn == RRefMessageKind::fork;
  return fits ? Status() : malformed(message, "does not fit sender and receiver");
}

Result<std::optional<RRefLedger::Received>> RRefLedger::receive(const RRefMessage& message) {
  if (Status status = check(message); !status.ok()) return status;
  if (dead_.contains(message.from) || !messages_seen_[message.from].first(message.number))
    return std::optional<Received>();
  switch (message.kind) {
    case RRefMessageKind::create: return on_create(message);
    case RRefMessageKind::fork: return on_fork(message);
    case RRefMessageKind::register_fork: on_register(message); break;
    case RRefMessageKind::confirm:
    case RRefMessageKind::gone: on_answer(message); break;
    case RRefMessageKind::accept: on_accept(message); break;
    case RRefMessageKind::release: on_release(message); break;
    case RRefMessageKind::withdraw: on_withdraw(message); break;
  }
  return std::optional<Received>();
}

/// A value that is still referred to can only be gone if a worker that passed on the reference has
/// died.
std::string DeadWorkers::causes() const {
  std::string text;
  for (const auto& [worker, cause] : all_) text += "; " + cause.message();
  return text;
}

std::optional<RRefLedger::Received> RRefLedger::on_create(const RRefMessage& message) {
  rrefs_seen_[message.rref.creator].first(message.rref.number);
  Owned& owned = owned_[message.rref];
  owned.created = true;
  ++owned.handles;
  // Forks that registered before the value was created are counted with the creator's.
  owned.waiting.insert(message.fork);
  for (const ForkId& fork : owned.waiting)
    send(fork.holder, RRefMessageKind::confirm, message.rref, fork);
  owned.forks.merge(owned.waiting);
  owned.waiting.clear();
  return Received{{message.rref}, {}};
}

std::optional<RRefLedger::Received> RRefLedger::on_fork(const RRefMessage& message) {
  const RRefReference reference{
      message.rref, message.rref.owner == self_ ? std::nullopt : std::optional(message.fork)};
  if (!reference.fork) {  // the reference has reached its owner
    if (message.from == self_)
      return Received{reference, state(reference)};  // a handle was counted when it was sent
    send(message.from, RRefMessageKind::accept, message.rref, message.fork);
    if (!owned_.contains(message.rref)) {
      if (was_created(message.rref)) {
        return Received{reference, Status(Code::closed,
                                          "the value of remote reference " + to_text(message.rref) +
                                              " has been dropped already" + dead_.causes())};
      }
      if (const Status dead = dead_.cause(message.rref.creator); !dead) {
        return Received{reference, dead.with_context("the value of remote reference " +
                                                     to_text(message.rref) + " was never made")};
      }
    }
    ++owned_[message.rref].handles;
    return Received{reference, {}};
  }
  Fork& fork = forks_[message.fork];
  fork.rref = message.rref;
  if (message.from != message.rref.owner) fork.parent = message.from;
  if (const Status dead = dead_.cause(message.rref.owner); !dead) {
    fork.state = ForkState::failed;
    fork.failure = dead;
    accept(fork, message.fork);
  } else if (message.counted) {
    fork.state = ForkState::confirmed;
  } else {
    send(message.rref.owner, RRefMessageKind::register_fork, message.rref, message.fork);
  }
  return Received{reference, fork.failure};
}

void RRefLedger::on_register(const RRefMessage& message) {
  const auto owned = owned_.find(message.rref);
  if (owned == owned_.end()) {
    if (was_created(message.rref)) {
      return send_gone(message.rref, message.fork,
                       "its value was dropped before the owner, worker " + std::to_string(self_) +
                           ", had heard of this reference: the worker that passed it on has ended" +
                           dead_.causes());
    }
    if (const Status dead = dead_.cause(message.rref.creator); !dead) {
      return send_gone(message.rref, message.fork, "its value was never made: " + dead.message());
    }
    owned_[message.rref].waiting.insert(message.fork);
    return;
  }
  if (!owned->second.created) {
    owned->second.waiting.insert(message.fork);
    return;
  }
  owned->second.forks.insert(message.fork);
  send(message.from, RRefMessageKind::confirm, message.rref, message.fork);
}

// confirm and gone
void RRefLedger::on_answer(const RRefMessage& message) {
  const auto found = forks_.find(message.fork);
  if (found == forks_.end() || found->second.state != ForkState::unconfirmed) return;
  Fork& fork = found->second;
  if (message.kind == RRefMessageKind::gone) {
    fail_fork(message.fork, fork,
              Status(Code::peer_failed,
                     "remote reference " + to_text(message.rref) + " is lost: " + message.reason));
    accept(fork, message.fork);
  } else {
    fork.state = ForkState::confirmed;
    effects_.confirmed.push_back(message.fork);
    accept(fork, message.fork);
  }
  settle_fork(message.fork);
}

void RRefLedger::on_accept(const RRefMessage& message) {
  const auto found = passed_on_.find(message.fork);
  if (found == passed_on_.end()) return;
  const ForkId parent = found->second.parent;
  passed_on_.erase(found);
  forks_.at(parent).children.erase(message.fork);
  settle_fork(parent);
}

void RRefLedger::on_release(const RRefMessage& message) {
  const auto owned = owned_.find(message.rref);
  if (owned == owned_.end()) return;
  owned->second.forks.erase(message.fork);
  owned->second.waiting.erase(message.fork);
  settle_owned(message.rref);
}

/// Records the withdrawn number as seen, so that the message is a duplicate if it still arrives.
void RRefLedger::on_withdraw(const RRefMessage& message) {
  if (!messages_seen_[message.from].first(message.withdrawn_number))
    return;  // the message had arrived
  if (message.withdrawn == RRefMessageKind::create) {
    rrefs_seen_[message.rref.creator].first(message.rref.number);
    const std::string reason =
        "the call that was to make its value never came to its owner, worker " +
        std::to_string(self_);
    if (const auto owned = owned_.find(message.rref); owned != owned_.end())
      fail_uncreated(owned, reason);
    return send_gone(message.rref, message.fork, reason);
  }
  if (message.from != message.rref.owner)
    return send(message.from, RRefMessageKind::accept, message.rref, message.fork);
  if (message.rref.owner == self_) return drop({message.rref});
  send(message.rref.owner, RRefMessageKind::release, message.rref, message.fork);
}

void RRefLedger::acknowledged(std::int32_t peer, std::uint64_t number) {
  unacknowledged_.erase({peer, number});
}

void RRefLedger::resend() {
  for (const auto& [key, message] : unacknowledged_) effects_.send.push_back(message);
}

void RRefLedger::lost(const RRefMessage& message) {
  RRefMessage withdrawal =
      numbered(message.to, RRefMessageKind::withdraw, message.rref, message.fork);
  withdrawal.withdrawn = message.kind;
  withdrawal.withdrawn_number = message.number;
  send(std::move(withdrawal));
}

void RRefLedger::withdraw_passed_on() {
  for (auto& [child, passed] : passed_on_) {
    if (std::exchange(passed.withdrawn, true)) continue;
    RRefMessage message;
    message.to = child.holder;
    message.number = passed.message;
    message.kind = RRefMessageKind::fork;
    message.rref = forks_.at(passed.parent).rref;
    message.fork = child;
    lost(message);
  }
}

void RRefLedger::worker_died(std::int32_t worker, const Status& cause) {
  if (!dead_.add(worker, cause)) return;
  messages_seen_.erase(worker);  // `receive` ignores whatever comes of it now
  std::erase_if(unacknowledged_, [&](const auto& entry) { return entry.first.first == worker; });

  std::vector<RRefId> owned;
  for (auto& [rref, value] : owned_) owned.push_back(rref);
  for (const RRefId& rref : owned) {
    const auto entry = owned_.find(rref);
    const auto of_the_dead = [&](const ForkId& fork) { return fork.holder == worker; };
    std::erase_if(entry->second.forks, of_the_dead);
    std::erase_if(entry->second.waiting, of_the_dead);
    if (!entry->second.created && rref.creator == worker) {
      fail_uncreated(entry, "its value was never made: " + cause.message());
    } else {
      settle_owned(rref);
    }
  }
  std::vector<ForkId> forks;
  for (auto& [id, fork] : forks_) forks.push_back(id);
  for (const ForkId& id : forks) {
    Fork& fork = forks_.at(id);
    const bool value_lost = fork.rref.owner == worker;
    for (auto child = fork.children.begin(); child != fork.children.end();) {
      if (value_lost || child->holder == worker) {
        passed_on_.erase(*child);
        child = fork.children.erase(child);
      } else {
        ++child;
      }
    }
    if (fork.parent == worker) fork.parent.reset();
    if (value_lost && fork.state != ForkState::failed) {
      fail_fork(id, fork, cause);
      accept(fork, id);
    }
    settle_fork(id);
  }
}

void RRefLedger::send_gone(const RRefId& rref, const ForkId& fork, std::string reason) {
  RRefMessage message = numbered(fork.holder, RRefMessageKind::gone, rref, fork);
  message.reason = std::move(reason);
  send(std::move(message));
}

// Tells the parent that it need not keep its own fork for this one any longer.
void RRefLedger::accept(Fork& fork, const ForkId& id) {
  if (!fork.parent) return;
  send(*fork.parent, RRefMessageKind::accept, fork.rref, id);
  fork.parent.reset();
}

void RRefLedger::fail_uncreated(std::map<RRefId, Owned>::iterator entry,
                                const std::string& reason) {
  const RRefId rref = entry->first;
  for (const ForkId& fork : entry->second.waiting) send_gone(rref, fork, reason);
  if (entry->second.handles > 0) {
    effects_.failed.emplace_back(
        RRefReference{rref},
        Status(Code::peer_failed, "remote reference " + to_text(rref) + " is lost: " + reason));
  }
  owned_.erase(entry);
}

void RRefLedger::fail_fork(const ForkId& id, Fork& fork, Status failure) {
  fork.state = ForkState::failed;
  fork.failure = failure;
  if (fork.held) effects_.failed.emplace_back(RRefReference{fork.rref, id}, std::move(failure));
}

void RRefLedger::settle_owned(const RRefId& rref) {
  const auto entry = owned_.find(rref);
  if (entry == owned_.end()) return;
  const Owned& owned = entry->second;
  if (owned.handles > 0 || !owned.forks.empty() || !owned.waiting.empty()) return;
  if (owned.created) effects_.drop.push_back(rref);
  owned_.erase(entry);
}

void RRefLedger::settle_fork(const ForkId& id) {
  const auto entry = forks_.find(id);
  if (entry == forks_.end()) return;
  const Fork& fork = entry->second;
  if (fork.held || !fork.children.empty() || fork.state == ForkState::unconfirmed) return;
  if (fork.state == ForkState::confirmed)
    send(fork.rref.owner, RRefMessageKind::release, fork.rref, id);
  forks_.erase(entry);
}

Status RRefLedger::state(const RRefReference& held) const {
  if (held.fork) {
    if (const auto fork = forks_.find(*held.fork); fork != forks_.end())
      return fork->second.failure;
  } else if (owned_.contains(held.rref)) {
    return {};
  }
  return Status(Code::closed, "remote reference " + to_text(held.rref) +
                                  " has been let go, or was lost with a worker that died");
}

bool RRefLedger::confirmed(const RRefReference& held) const {
  if (!held.fork) return true;
  const auto fork = forks_.find(*held.fork);
  return fork != forks_.end() && fork->second.state == ForkState::confirmed;
}

bool RRefLedger::empty() const {
  return owned_.empty() && forks_.empty() && passed_on_.empty() && unacknowledged_.empty();
}

std::set<std::int32_t> RRefLedger::waiting_for() const {
  std::set<std::int32_t> workers;
  for (const auto& [rref, owned] : owned_) {
    for (const ForkId& fork : owned.forks) workers.insert(fork.holder);
    for (const ForkId& fork : owned.waiting) workers.insert(fork.holder);
  }
  for (const auto& [id, fork] : forks_) {
    if (fork.state == ForkState::unconfirmed) workers.insert(fork.rref.owner);
    for (const ForkId& child : fork.children) workers.insert(child.holder);
  }
  for (const auto& [key, message] : unacknowledged_) workers.insert(key.first);
  return workers;
}

std::string RRefLedger::text() const {
  std::ostringstream out;
  out << "worker " << self_ << "\n";
  for (const auto& [rref, owned] : owned_) {
    out << " owns " << to_text(rref) << (owned.created ? " " : " not yet made, ") << owned.handles
        << " handles, forks " << to_text_all(owned.forks) << ", waiting "
        << to_text_all(owned.waiting) << "\n";
  }
  for (const auto& [id, fork] : forks_) {
    constexpr const char* kStates[] = {"unconfirmed", "confirmed", "failed"};
    out << " fork " << to_text(id) << " of " << to_text(fork.rref) << " "
        << kStates[static_cast<std::size_t>(fork.state)] << (fork.held ? " held" : "");
    if (fork.parent) out << " from " << *fork.parent;
    out << ", passed on " << to_text_all(fork.children) << "\n";
  }
  const auto numbers = [&](const char* name, const auto& table) {
    out << name;
    for (const auto& [worker, number] : table) out << " " << worker << ":" << number;
  };
  numbers(" next", next_message_);
  numbers(" rrefs", next_rref_);
  numbers(" forks", next_fork_);
  const auto seen = [&](const char* name, const auto& table) {
    out << name;
    for (const auto& [worker, number] : table) out << " " << worker << ":" << number.text();
  };
  seen(" seen", messages_seen_);
  seen(" created", rrefs_seen_);
  for (const auto& [key, message] : unacknowledged_)
    out << " sent " << key.first << "#" << key.second;
  for (const auto& [worker, cause] : dead_.all()) out << " dead " << worker;
  out << "\n";
  return std::move(out).str();
}

}  // namespace muster::rpc
