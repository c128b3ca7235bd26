// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/etcd/etcd_store.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <thread>

#include "core/base/bytes.h"

namespace muster::store::etcd {
namespace {

/// For how long members that missed a failed round get its failure instead of joining the next one.
constexpr std::int64_t kLateSeconds = 60;  // limit: what a later run on the same keys may see
/// A member of one of this many earlier rounds may not have read its outcome yet.
constexpr std::uint64_t kKeptRounds = 16;  // limit: rounds that a slow rank may still read
/// "<members>/<index>" in the key of a member of an all_gather.
constexpr std::size_t kMemberDigits = 16 + 1 + 16;

std::string hexadecimal16(std::uint64_t number) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(number));
  return digits.data();
}

Status too_few() { return Status(Code::store, "etcd answered a transaction with too few replies"); }

}  // namespace

Result<std::int64_t> LiveLease::get(TimePoint deadline) {
  const std::lock_guard lock(mutex_);
  const TimePoint begin = steady_clock().now();
  if (begin < fresh_until_) return id_;
  Result<EtcdLease> lease = Status(Code::closed, "no lease");
  if (id_ != 0 && begin < dead_at_) lease = client_.keep_alive(id_, deadline);
  if (!lease && lease.status().code() == Code::closed) lease = client_.grant(kSeconds, deadline);
  if (!lease) return lease.status();
  id_ = lease->id;
  fresh_until_ = begin + kPulse;
  dead_at_ = begin + std::chrono::seconds(kSeconds);
  return id_;
}

/// The round that goes on, and how the one before it ended.
struct EtcdMeeting::MeetingState {
  std::int64_t mod_revision = 0;  // 0: there is no such key yet
  std::uint64_t round = 0;
  Status outcome;
  std::int64_t complete_at = 0;          // the revision at which all were there
  std::vector<std::int32_t> unnotified;  // did not come to a failed round and do not know of it yet

  std::string text() const {
    ByteWriter out;
    out.put(round).put(outcome.code()).put_text(outcome.message());
    out.put(static_cast<std::uint32_t>(outcome.ranks().size()));
    for (const int rank : outcome.ranks()) out.put(static_cast<std::int32_t>(rank));
    out.put(complete_at).put(static_cast<std::uint32_t>(unnotified.size()));
    for (const std::int32_t index : unnotified) out.put(index);
    return out.take();
  }
  static MeetingState of(const KeyValue& stored) {
    MeetingState state;
    state.mod_revision = stored.mod_revision;
    ByteReader in(stored.value);
    state.round = in.get<std::uint64_t>();
    const auto code = in.get<Code>();
    std::string message(in.get_text());
    std::vector<int> ranks;
    for (auto count = in.get<std::uint32_t>(); count > 0 && in.ok(); --count)
      ranks.push_back(in.get<std::int32_t>());
    state.outcome = Status(code, std::move(message), std::move(ranks));
    if (code == Code::ok) state.outcome = {};
    state.complete_at = in.get<std::int64_t>();
    for (auto count = in.get<std::uint32_t>(); count > 0 && in.ok(); --count)
      state.unnotified.push_back(in.get<std::int32_t>());
    return state;
  }
};

EtcdMeeting::EtcdMeeting(const Request& request, const Keys& keys, Writer& writer, LiveLease& lease)
    : request_(request),
      keys_(keys),
      writer_(writer),
      lease_(lease),
      prefix_(keys.meeting(request.op == StoreOp::barrier ? 'b' : 'g', request.keys[0])) {}

std::string EtcdMeeting::call() const { return call_text(request_.op, request_.keys[0]); }

std::string EtcdMeeting::round_prefix(std::uint64_t round) const {
  return prefix_ + "r" + hexadecimal16(round) + "/";
}

std::string EtcdMeeting::end_key(std::uint64_t round) const {
  return prefix_ + "e" + hexadecimal16(round);
}

std::string EtcdMeeting::presence_prefix() const {
  return round_prefix(round_) + hexadecimal16(static_cast<std::uint64_t>(request_.members)) + "/";
}

Status EtcdMeeting::read_state(MeetingState& state) {
  Txn txn;
  txn.then.push_back(KeyRange{.key = state_key()});
  txn.then.push_back(KeyRange{.key = late_key(), .count_only = true});
  const auto reply = writer_.client().txn(txn, hard_deadline_);
  if (!reply) return reply.status();
  if (reply->replies.size() != 2) return too_few();
  state = {};
  if (!reply->replies[0].values.empty()) state = MeetingState::of(reply->replies[0].values[0]);
  if (reply->replies[1].count == 0) state.unnotified.clear();
  return {};
}

Reply EtcdMeeting::run(TimePoint deadline, TimePoint hard_deadline) {
  hard_deadline_ = hard_deadline;
  const TimePoint begin = steady_clock().now();
  const auto failed = [&](const Status& status) {
    if (!own_key_.empty()) leave();
    return Reply{status.with_context(call()), 0, {}};
  };
  while (true) {
    MeetingState state;
    if (Status read = read_state(state); !read) return failed(read);
    const MeetingArrival arrival = arrive(state);
    if (arrival == MeetingArrival::over) return std::move(reply_);
    if (arrival == MeetingArrival::again) continue;
    const Status awaited = await_end(deadline);
    if (awaited.ok()) return std::move(reply_);
    if (awaited.code() != Code::timed_out) return failed(awaited);
    if (Status gave_up = give_up(steady_clock().now() - begin); !gave_up) return failed(gave_up);
    return std::move(reply_);
  }
}

EtcdMeeting::MeetingArrival EtcdMeeting::settle_unnotified(const MeetingState& state) {
  MeetingState next = state;
  const bool late =
      std::erase(next.unnotified, request_.index) > 0 && request_.op == StoreOp::all_gather;
  if (!late) next.unnotified.clear();  // a member begins a new round
  Txn txn;
  txn.when.push_back({.key = state_key(),
                      .target = Compare::EtcdTarget::mod_revision,
                      .number = state.mod_revision});
  txn.then.push_back(Put{.key = state_key(), .value = next.text()});
  const auto written = writer_.commit(std::move(txn), hard_deadline_);
  if (!written) {
    reply_.status = written.status().with_context(call());
    return MeetingArrival::over;
  }
  if (!written->done || !late) return MeetingArrival::again;
  reply_.status = came_too_late(state.outcome, request_.members);
  return MeetingArrival::over;
}

EtcdMeeting::MeetingArrival EtcdMeeting::arrive(const MeetingState& state) {
  const auto over = [&](const Status& status) {
    reply_.status = status;
    return MeetingArrival::over;
  };
  if (!state.unnotified.empty()) return settle_unnotified(state);
  round_ = state.round;
  known_.clear();
  name_ = request_.op == StoreOp::barrier
              ? random_name()
              : hexadecimal16(static_cast<std::uint64_t>(request_.index));
  own_key_ = presence_prefix() + name_;
  const auto lease = lease_.get(hard_deadline_);
  if (!lease) return over(lease.status().with_context(call()));
  const std::string_view value =
      request_.op == StoreOp::all_gather ? request_.values[0] : std::string_view();
  auto stored = writer_.prepare(keys_.pieces(own_key_), value, hard_deadline_);
  if (!stored) return over(stored.status().with_context(call()));
  const std::string round = round_prefix(round_), present = presence_prefix();
  Txn txn;
  txn.when.push_back({.key = state_key(),
                      .target = Compare::EtcdTarget::mod_revision,
                      .number = state.mod_revision});
  txn.when.push_back({.key = own_key_, .number = 0});
  if (!stored->pieces.empty())
    txn.when.push_back({.key = stored->first, .relation = Compare::Relation::greater, .number = 0});
  txn.then.push_back(Put{.key = own_key_, .value = stored->stored, .lease = *lease});
  txn.then.push_back(KeyRange{.key = round,
                              .range_end = prefix_end(round),
                              .limit = 1,
                              .keys_only = true,
                              .oldest_first = true});
  txn.then.push_back(
      KeyRange{.key = present, .range_end = prefix_end(present), .count_only = true});
  txn.otherwise.push_back(KeyRange{.key = own_key_, .keys_only = true});
  auto written = writer_.commit(std::move(txn), hard_deadline_);
  if (!written) return over(written.status().with_context(call()));
  if (!written->done) return taken(state, written->replies[0]);
  arrived_at_ = written->revision;
  std::int64_t position = 0;
  if (written->repeated) {
    const auto all = presence(arrived_at_, true);
    if (!all) return over(all.status().with_context(call()));
    position = static_cast<std::int64_t>(all->size());
  } else {
    if (Status fits = check_members(state, written->replies[1]); !fits) {
      leave();
      return over(fits);
    }
    position = written->replies[2].count;
  }
  if (position > request_.members) {  // the round was complete without this member
    leave();
    const Status ended = end(state, 0, {}, arrived_at_ - 1);
    return ended.ok() ? MeetingArrival::again : over(ended.with_context(call()));
  }
  if (position == request_.members) {
    if (Status ended = end(state, 0, {}, arrived_at_); !ended)
      return over(ended.with_context(call()));
  }
  return MeetingArrival::arrived;
}

EtcdMeeting::MeetingArrival EtcdMeeting::taken(const MeetingState& state,
                                               const OperationReply& own) {
  if (own.values.empty()) return MeetingArrival::again;  // the state has changed
  own_key_.clear();
  std::int64_t seen = 0;
  const auto all = presence(0, true, &seen);
  if (!all) {
    reply_.status = all.status().with_context(call());
    return MeetingArrival::over;
  }
  if (static_cast<std::int32_t>(all->size()) >= request_.members) {
    const Status ended = end(state, 0, {}, seen);
    if (ended.ok()) return MeetingArrival::again;
    reply_.status = ended.with_context(call());
    return MeetingArrival::over;
  }
  // It may be what a process left behind that was killed and started anew; its lease ends soon.
  const TimePoint now = steady_clock().now();
  if (ghost_until_ == TimePoint::max())
    ghost_until_ = now + std::chrono::seconds(LiveLease::kSeconds) + LiveLease::kPulse;
  if (now < std::min(ghost_until_, hard_deadline_)) {
    constexpr Duration kPause = std::chrono::milliseconds(200);  // limit: pace of attempts
    std::this_thread::sleep_for(kPause);
    return MeetingArrival::again;
  }
  reply_.status = index_is_taken(call(), request_.index);
  return MeetingArrival::over;
}

Status EtcdMeeting::check_members(const MeetingState& state, const OperationReply& others) {
  const std::string round = round_prefix(state.round);
  if (others.values.empty() || others.values[0].key.starts_with(presence_prefix())) return {};
  std::uint64_t members = 0;
  const std::string digits = others.values[0].key.substr(round.size(), 16);
  std::from_chars(digits.data(), digits.data() + digits.size(), members, 16);
  return other_number_of_members(call(), static_cast<std::int64_t>(members), request_.members);
}

Result<std::vector<KeyValue>> EtcdMeeting::presence(std::int64_t revision, bool keys_only,
                                                    std::int64_t* seen) {
  const std::string prefix = presence_prefix();
  Txn txn;
  txn.then.push_back(KeyRange{.key = prefix,
                              .range_end = prefix_end(prefix),
                              .revision = revision,
                              .keys_only = keys_only});
  auto reply = writer_.client().txn(txn, hard_deadline_);
  if (!reply) return reply.status();
  if (reply->replies.size() != 1) return too_few();
  if (seen != nullptr) *seen = reply->revision;
  return std::move(reply->replies[0].values);
}

std::vector<int> EtcdMeeting::missing(const std::vector<KeyValue>& present) const {
  std::vector<int> indices;
  if (request_.op != StoreOp::all_gather) return indices;
  const std::string prefix = presence_prefix();
  for (int index = 0; index < request_.members; ++index) {
    const std::string key = prefix + hexadecimal16(static_cast<std::uint64_t>(index));
    const bool there = std::any_of(present.begin(), present.end(),
                                   [&](const KeyValue& each) { return each.key == key; });
    if (!there) indices.push_back(index);
  }
  return indices;
}

Status EtcdMeeting::end(const MeetingState& state, std::int64_t seen, const Status& outcome,
                        std::int64_t complete_at) {
  MeetingState next;
  next.round = state.round + 1;
  next.outcome = outcome;
  next.complete_at = complete_at;
  if (!outcome.ok() && request_.op == StoreOp::all_gather)
    next.unnotified.assign(outcome.ranks().begin(), outcome.ranks().end());
  Txn txn;
  txn.when.push_back({.key = state_key(),
                      .target = Compare::EtcdTarget::mod_revision,
                      .number = state.mod_revision});
  if (seen > 0) {  // no member has arrived since
    const std::string present = presence_prefix();
    txn.when.push_back({.key = present,
                        .target = Compare::EtcdTarget::mod_revision,
                        .relation = Compare::Relation::less,
                        .number = seen + 1,
                        .range_end = prefix_end(present)});
  }
  txn.then.push_back(Put{.key = state_key(), .value = next.text()});
  txn.then.push_back(Put{.key = end_key(state.round), .value = next.text()});
  if (state.round >= kKeptRounds)
    txn.then.push_back(Delete{.key = end_key(state.round - kKeptRounds)});
  if (!next.unnotified.empty()) {
    const auto lease = writer_.client().grant(kLateSeconds, hard_deadline_);
    if (!lease) return lease.status();
    txn.then.push_back(Put{.key = late_key(), .value = {}, .lease = lease->id});
  }
  if (state.round > 0) {  // members of this round have read the outcome of the last one
    const std::string old = round_prefix(state.round - 1);
    txn.then.push_back(Delete{.key = old, .range_end = prefix_end(old)});
    if (request_.op == StoreOp::all_gather) {
      const std::string pieces = keys_.pieces(old, old.size() + kMemberDigits);
      txn.then.push_back(Delete{.key = pieces, .range_end = prefix_end(pieces)});
    }
  }
  return writer_.commit(std::move(txn), hard_deadline_).status();
}

Status EtcdMeeting::look_after() {
  if (const auto lease = lease_.get(hard_deadline_); !lease) return lease.status();
  MeetingState state;
  if (Status read = read_state(state); !read) return read;
  if (state.round != round_) return {};  // the watch tells of it
  std::int64_t seen = 0;
  const auto present = presence(0, true, &seen);
  if (!present) return present.status();
  if (static_cast<std::int32_t>(present->size()) >= request_.members) {
    return end(state, 0, {}, seen);
  }
  std::set<std::string> there;
  for (const KeyValue& each : *present) there.insert(each.key);
  for (const std::string& key : known_) {
    if (there.contains(key)) continue;
    const auto index =
        static_cast<int>(std::strtoll(key.substr(key.size() - 16).c_str(), nullptr, 16));
    const bool gather = request_.op == StoreOp::all_gather;
    const Status cause(
        Code::peer_failed,
        call() + ": " +
            (gather ? "rank " + std::to_string(index) : "one of the members that had come") +
            " has lost its lease in the store; its process has probably ended",
        gather ? std::vector<int>{index} : std::vector<int>{});
    return end(state, seen, cause, 0);
  }
  known_ = std::move(there);
  return {};
}

Result<bool> EtcdMeeting::finished() {
  Txn txn;
  txn.then.push_back(KeyRange{.key = end_key(round_)});
  const auto reply = writer_.client().txn(txn, hard_deadline_);
  if (!reply) return reply.status();
  if (reply->replies.size() != 1) return too_few();
  if (reply->replies[0].values.empty()) return false;
  read_outcome(MeetingState::of(reply->replies[0].values[0]));
  return true;
}

void EtcdMeeting::read_outcome(const MeetingState& ended) {
  reply_ = {ended.outcome, 0, {}};
  if (!ended.outcome.ok() || request_.op != StoreOp::all_gather) return;
  auto all = presence(ended.complete_at, false);
  if (!all && ended.complete_at != 0) all = presence(0, false);  // etcd keeps no old revisions
  if (all && static_cast<std::int32_t>(all->size()) != request_.members)
    all = Status(Code::store, "the values were removed before this member had read them");
  for (std::size_t i = 0; all && i < all->size(); ++i) {
    auto value = writer_.restore(keys_.pieces((*all)[i].key), (*all)[i].value, hard_deadline_);
    if (value)
      reply_.values.push_back(std::make_shared<const std::string>(std::move(*value)));
    else
      all = value.status();
  }
  if (!all) reply_ = {all.status().with_context(call()), 0, {}};
}

Status EtcdMeeting::await_end(TimePoint deadline) {
  Status trouble;
  const auto look = [&] {
    const auto over = finished();
    if (!over) trouble = over.status();
    return !over || *over;
  };
  const Status watched =
      writer_.client().watch({.key = end_key(round_),
                              .deadline = deadline,
                              .on_open = look,
                              .on_events = [&](const std::vector<Event>&) { return look(); },
                              .on_idle =
                                  [&] {
                                    trouble = look_after();
                                    return !trouble.ok();
                                  },
                              .idle = LiveLease::kPulse});
  return trouble.ok() ? watched : trouble;
}

Status EtcdMeeting::give_up(Duration waited) {
  while (true) {
    MeetingState state;
    if (Status read = read_state(state); !read) return read;
    const auto over = finished();
    if (!over || *over) return over.status();
    if (state.round != round_)
      return Status(Code::store, "the others have met many times since this member waited");
    std::int64_t seen = 0;
    const auto present = presence(0, true, &seen);
    if (!present) return present.status();
    const bool complete = static_cast<std::int32_t>(present->size()) >= request_.members;
    const Status outcome = complete ? Status()
                                    : members_are_missing(call(), present->size(), request_.members,
                                                          waited, missing(*present));
    if (Status ended = end(state, complete ? 0 : seen, outcome, seen); !ended) return ended;
  }
}

void EtcdMeeting::leave() {
  Txn txn;
  txn.then.push_back(Delete{.key = std::exchange(own_key_, {})});
  constexpr Duration kLimit = std::chrono::seconds(2);  // limit: patience at the end
  const auto ignored =
      writer_.client().txn(txn, std::min(hard_deadline_, steady_clock().now() + kLimit));
  static_cast<void>(ignored);  // its lease ends it
}

}  // namespace muster::store::etcd
