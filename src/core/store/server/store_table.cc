// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/server/store_table.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/store/job_keys.h"
#include "muster/key_value_store.h"

namespace muster::store {
namespace {

constexpr Duration kLongWait = std::chrono::seconds(10);

Reply failure(Code code, std::string message) { return {Status(code, std::move(message)), 0, {}}; }

std::optional<std::int64_t> decimal(std::string_view text) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return value;
}

Value make_value(std::string_view text) { return std::make_shared<const std::string>(text); }

}  // namespace

void StoreTable::submit(Ticket ticket, const Request& request, TimePoint now, Answers& answers) {
  if (Status valid = validate(request); !valid) {
    answers.push_back({ticket, {std::move(valid), 0, {}}});
    return;
  }
  if (LeaseTable::serves(request.op)) return leases_.submit(ticket, request, now, answers);
  switch (request.op) {
    case StoreOp::get:
    case StoreOp::wait:
    case StoreOp::multi_get: return submit_waiting(ticket, request, now, answers);
    case StoreOp::queue_pop: return submit_pop(ticket, request, now, answers);
    case StoreOp::barrier:
    case StoreOp::all_gather: return submit_meeting(ticket, request, now, answers);
    case StoreOp::register_member: return submit_member(ticket, request, now, answers);
    default: break;
  }
  Reply reply = execute(request, answers);
  answers.push_back({ticket, std::move(reply)});
}

Value StoreTable::find(std::string_view key) const {
  const auto entry = values_.find(key);
  return entry == values_.end() ? nullptr : Value(entry->second);
}

StoreTable::QueueLoad StoreTable::queue_load(std::string_view key) const {
  QueueLoad load;
  const auto queue = queues_.find(key);
  if (queue == queues_.end()) return load;
  load.entries = queue->second.size();
  for (const Value& each : queue->second) load.bytes += each->size();
  return load;
}

Reply StoreTable::execute(const Request& request, Answers& answers) {
  const std::string_view key = request.keys.empty() ? std::string_view() : request.keys[0];
  switch (request.op) {
    case StoreOp::set: put(key, request.values[0], answers); return {};
    case StoreOp::multi_set:
      for (std::size_t i = 0; i < request.keys.size(); ++i)
        put(request.keys[i], request.values[i], answers);
      return {};
    case StoreOp::add: return add(key, request.number, answers);
    case StoreOp::compare_set:
      return compare_set(key, request.values[0], request.values[1], answers);
    case StoreOp::append: return append(key, request.values[0], answers);
    case StoreOp::queue_push: return queue_push(key, request.values[0], answers);
    case StoreOp::queue_len: {
      const auto queue = queues_.find(key);
      return {{}, queue == queues_.end() ? 0 : static_cast<std::int64_t>(queue->second.size()), {}};
    }
    case StoreOp::leave:
    case StoreOp::abandon: return leave(request, answers);
    case StoreOp::count_joins: return {{}, joins_, {}};
    case StoreOp::count_refusals:
    case StoreOp::enter: return {{}, 0, {}};  // handled by the server
    case StoreOp::num_keys: return {{}, static_cast<std::int64_t>(values_.size()), {}};
    case StoreOp::delete_key: {
      const auto entry = values_.find(key);
      if (entry == values_.end()) return {{}, 0, {}};
      values_.erase(entry);
      return {{}, 1, {}};
    }
    case StoreOp::check: {
      const bool all = std::all_of(request.keys.begin(), request.keys.end(),
                                   [&](std::string_view each) { return values_.contains(each); });
      return {{}, all ? 1 : 0, {}};
    }
    case StoreOp::list_keys: {
      Reply reply;
      for (const auto& [name, value] : values_) reply.values.push_back(make_value(name));
      return reply;
    }
    default:
      return failure(Code::internal,
                     "the store was asked to execute " + std::string(name_of(request.op)));
  }
}

Reply StoreTable::leave(const Request& request, Answers& answers) {
  const auto entry = jobs_.find(std::string(request.keys[0]));
  if (entry == jobs_.end() || !entry->second.present.contains(request.index)) return {{}, 0, {}};
  const Ticket registration = entry->second.present[request.index];
  depart(std::string(request.keys[0]), request.index, why_left(request), answers);
  unpark(registration);
  return {{}, 1, {}};
}

Reply StoreTable::add(std::string_view key, std::int64_t amount, Answers& answers) {
  std::int64_t sum = amount;
  if (const auto entry = values_.find(key); entry != values_.end()) {
    const auto current = decimal(*entry->second);
    if (!current)
      return failure(Code::store, "add(" + quoted(key) + "): the value stored there, " +
                                      quoted(*entry->second) + ", is not a whole number");
    if (__builtin_add_overflow(*current, amount, &sum)) {
      return failure(Code::store, "add(" + quoted(key) + "): " + *entry->second + " + " +
                                      std::to_string(amount) + " does not fit into 64 bits");
    }
  }
  put(key, std::to_string(sum), answers);
  return {{}, sum, {}};
}

Reply StoreTable::compare_set(std::string_view key, std::string_view expected,
                              std::string_view desired, Answers& answers) {
  const auto entry = values_.find(key);
  const bool matches = entry == values_.end() ? expected.empty() : *entry->second == expected;
  if (!matches)
    return {{}, 0, {entry == values_.end() ? make_value(expected) : Value(entry->second)}};
  put(key, desired, answers);
  return {{}, 1, {values_.find(key)->second}};
}

Reply StoreTable::append(std::string_view key, std::string_view value, Answers& answers) {
  const auto entry = values_.find(key);
  if (entry == values_.end()) {
    put(key, value, answers);
    return {};
  }
  MutableValue& current = entry->second;
  if (value.size() > kMaxValueBytes - current->size()) {
    return failure(Code::exhausted, "append(" + quoted(key) +
                                        "): the value would grow beyond the limit of " +
                                        std::to_string(kMaxValueBytes) + " bytes");
  }
  if (current.use_count() > 1)
    current = std::make_shared<std::string>(*current);  // a reader still holds the old one
  current->append(value);
  return {};
}

void StoreTable::put(std::string_view key, std::string_view value, Answers& answers) {
  auto fresh = std::make_shared<std::string>(value);
  const auto entry = values_.find(key);
  if (entry != values_.end()) {
    entry->second = std::move(fresh);
    return;
  }
  values_.emplace(std::string(key), std::move(fresh));
  const auto waiters = awaited_.find(key);
  if (waiters == awaited_.end()) return;
  const std::vector<Ticket> woken = std::move(waiters->second);
  awaited_.erase(waiters);
  for (const Ticket ticket : woken) {
    Parked& parked = parked_.at(ticket);
    if (find_missing(parked)) {
      awaited_[parked.keys[parked.at]].push_back(ticket);
      continue;
    }
    answers.push_back({ticket, found(parked)});
    deadlines_.erase({parked.deadline, ticket});
    parked_.erase(ticket);
  }
}

bool StoreTable::find_missing(Parked& parked) const {
  // Searches cyclically from the last position: keys that arrive in order cost one lookup each, and
  // a key deleted in the meantime is still noticed.
  for (std::size_t step = 0; step < parked.keys.size(); ++step) {
    const std::size_t index = (parked.at + step) % parked.keys.size();
    if (values_.contains(std::string_view(parked.keys[index]))) continue;
    parked.at = index;
    return true;
  }
  return false;
}

Reply StoreTable::found(const Parked& parked) const {
  Reply reply;
  if (parked.op == StoreOp::wait) return reply;
  for (const std::string& key : parked.keys) reply.values.push_back(values_.find(key)->second);
  return reply;
}

void StoreTable::submit_waiting(Ticket ticket, const Request& request, TimePoint now,
                                Answers& answers) {
  if (request.op == StoreOp::get) {  // the common case, without copying the key
    if (const auto entry = values_.find(request.keys[0]); entry != values_.end()) {
      answers.push_back({ticket, {{}, 0, {entry->second}}});
      return;
    }
  }
  park(ticket, request, now);
  Parked& parked = parked_.at(ticket);
  if (find_missing(parked)) {
    awaited_[parked.keys[parked.at]].push_back(ticket);
    return;
  }
  answers.push_back({ticket, found(parked)});
  deadlines_.erase({parked.deadline, ticket});
  parked_.erase(ticket);
}

void StoreTable::submit_pop(Ticket ticket, const Request& request, TimePoint now,
                            Answers& answers) {
  const std::string_view key = request.keys[0];
  const auto queue = queues_.find(key);
  if (queue == queues_.end()) {
    if (request.number == 0) {
      answers.push_back(
          {ticket, failure(Code::store, "queue_pop(" + quoted(key) + "): the queue is empty")});
      return;
    }
    park(ticket, request, now);
    queue_waiters_[std::string(key)].push_back(ticket);
    return;
  }
  answers.push_back({ticket, {{}, 0, {std::move(queue->second.front())}}});
  queue->second.pop_front();
  if (queue->second.empty()) queues_.erase(queue);
}

Reply StoreTable::queue_push(std::string_view key, std::string_view value, Answers& answers) {
  const auto waiters = queue_waiters_.find(key);
  if (waiters == queue_waiters_.end()) {
    std::deque<Value>& queue = queues_[std::string(key)];
    queue.push_back(make_value(value));
    return {{}, static_cast<std::int64_t>(queue.size()), {}};
  }
  const Ticket first = waiters->second.front();
  answers.push_back({first, {{}, 0, {make_value(value)}}});
  unpark(first);
  return {};
}

void StoreTable::submit_meeting(Ticket ticket, const Request& request, TimePoint now,
                                Answers& answers) {
  const MeetingKey key(request.op, request.keys[0]);
  const std::string call = call_text(request.op, request.keys[0]);
  if (const auto past = failed_gathers_.find(key); past != failed_gathers_.end()) {
    const bool late = past->second.unnotified.erase(request.index) > 0;
    const Status cause = past->second.cause;
    if (!late || past->second.unnotified.empty())
      failed_gathers_.erase(past);  // a member that was told starts a new round
    if (late) {
      if (request.op == StoreOp::all_gather) forget_arrival(key.second, request.index);
      answers.push_back({ticket, {came_too_late(cause, request.members), 0, {}}});
      return;
    }
  }
  const auto going_on = meetings_.find(key);
  if (Status cause =
          absence(request.keys[0], request.members,
                  going_on == meetings_.end() ? nullptr : &going_on->second, request.index);
      !cause) {
    answers.push_back({ticket, {cause.with_context(call), 0, {}}});
    return;
  }
  Meeting& meeting = meetings_[key];
  if (meeting.members == 0) {
    meeting.members = request.members;
    meeting.since = now;
    meeting.overdue = now + kLongWait;
  }
  if (meeting.members != request.members) {
    answers.push_back(
        {ticket, {other_number_of_members(call, meeting.members, request.members), 0, {}}});
    return;
  }
  const std::int32_t index = request.op == StoreOp::barrier ? meeting.next_index++ : request.index;
  if (meeting.present.contains(index)) {
    answers.push_back({ticket, {index_is_taken(call, index), 0, {}}});
    return;
  }
  park(ticket, request, now);
  parked_.at(ticket).index = index;
  meeting.present[index] = {
      ticket, request.op == StoreOp::all_gather ? make_value(request.values[0]) : nullptr};
  if (static_cast<std::int32_t>(meeting.present.size()) < meeting.members) return;
  const Meeting complete = std::move(meeting);
  meetings_.erase(key);
  if (request.op == StoreOp::all_gather && is_join_key(key.second))
    settle_members(key.second, complete);
  Reply reply;
  if (request.op == StoreOp::all_gather) {
    for (const auto& [member, entry] : complete.present) reply.values.push_back(entry.second);
  }
  for (const auto& [member, entry] : complete.present) {
    answers.push_back({entry.first, reply});
    unpark(entry.first);
  }
}

void StoreTable::submit_member(Ticket ticket, const Request& request, TimePoint now,
                               Answers& answers) {
  JobMembers& job = jobs_[std::string(request.keys[0])];
  if (job.members == 0) job.members = request.members;
  // A restarted process joins as a new member.
  if (is_join_key(request.keys[0]) &&
      failed_gathers_.contains({StoreOp::all_gather, std::string(request.keys[0])})) {
    const auto past = failed_gathers_.find({StoreOp::all_gather, std::string(request.keys[0])});
    if (!past->second.unnotified.contains(request.index)) failed_gathers_.erase(past);
  }
  const bool was_here =
      std::ranges::any_of(job.gone, [&](const auto& gone) { return gone.first == request.index; });
  if (job.members != request.members || job.present.contains(request.index) || was_here) {
    answers.push_back({ticket, failure(Code::mismatch,
                                       "register_member(" + quoted(request.keys[0]) + "): member " +
                                           std::to_string(request.index) +
                                           " is known already, or the number of members differs")});
    return;
  }
  job.present[request.index] = ticket;
  park(ticket, request, now);
  parked_.at(ticket).index = request.index;
}

void StoreTable::settle_members(const std::string& key, const Meeting& complete) {
  ++joins_;
  auto job = jobs_.extract(key);
  if (job.empty()) return;
  std::string tokens;
  for (const auto& [member, entry] : complete.present) tokens += *entry.second;
  job.key() = job_of(key, tokens);
  for (const auto& [index, ticket] : job.mapped().present) parked_.at(ticket).keys[0] = job.key();
  jobs_.insert(std::move(job));
}

/// Forgets a member that has learned, or caused, the outcome of its joining: its later disconnect
/// affects no other member.
void StoreTable::forget_arrival(const std::string& key, std::int32_t index) {
  const auto entry = is_join_key(key) ? jobs_.find(key) : jobs_.end();
  if (entry == jobs_.end()) return;
  entry->second.present.erase(index);
  if (entry->second.present.empty()) jobs_.erase(entry);
}

/// Fails the join at once for the other members, including those that have not arrived yet.
void StoreTable::depart_while_joining(const std::string& key, std::int32_t index,
                                      const Status& cause, Answers& answers) {
  const auto entry = jobs_.find(key);
  if (entry == jobs_.end() || !entry->second.present.contains(index)) return;
  const std::int32_t members = entry->second.members;
  forget_arrival(key, index);
  const MeetingKey meeting(StoreOp::all_gather, key);
  if (meetings_.contains(meeting)) {
    fail_meeting(meeting, cause.with_context(call_text(StoreOp::all_gather, key)), answers);
  } else if (!failed_gathers_.contains(meeting)) {
    const auto all = absent(members, nullptr);
    failed_gathers_[meeting] = {cause, std::set<std::int32_t>(all.begin(), all.end())};
  }
  const auto past = failed_gathers_.find(meeting);
  if (past != failed_gathers_.end() && past->second.unnotified.erase(index) > 0 &&
      past->second.unnotified.empty())
    failed_gathers_.erase(past);
}

void StoreTable::depart(const std::string& job, std::int32_t index, const Status& cause,
                        Answers& answers) {
  if (is_join_key(job)) return depart_while_joining(job, index, cause, answers);
  const auto entry = jobs_.find(job);
  if (entry == jobs_.end() || entry->second.present.erase(index) == 0) return;
  const std::int32_t members = entry->second.members;
  const std::string prefix = job + "/";
  if (entry->second.present.empty()) {  // the last member: no other is left to notify
    jobs_.erase(entry);
  } else {
    entry->second.gone.emplace_back(index, cause);
  }
  std::vector<MeetingKey> broken;
  for (const auto& [key, meeting] : meetings_) {
    if (!key.second.starts_with(prefix) || meeting.members != members) continue;
    if (key.first == StoreOp::barrier || !meeting.present.contains(index)) broken.push_back(key);
  }
  for (const MeetingKey& key : broken)
    fail_meeting(key, cause.with_context(call_text(key.first, key.second)), answers);
}

Status StoreTable::absence(std::string_view key, std::int32_t members, const Meeting* meeting,
                           std::int32_t self) const {
  for (const auto& [job, ranks] : jobs_) {
    if (ranks.members != members || key.size() <= job.size() || !key.starts_with(job) ||
        key[job.size()] != '/')
      continue;
    for (const auto& [index, cause] : ranks.gone) {
      if (index != self && (meeting == nullptr || !meeting->present.contains(index))) return cause;
    }
  }
  return {};
}

std::vector<int> StoreTable::absent(std::int32_t members, const Meeting* meeting) {
  std::vector<int> indices;
  for (int index = 0; index < members; ++index) {
    if (meeting == nullptr || !meeting->present.contains(index)) indices.push_back(index);
  }
  return indices;
}

void StoreTable::fail_meeting(const MeetingKey& key, const Status& cause, Answers& answers) {
  const auto entry = meetings_.find(key);
  const Meeting meeting = std::move(entry->second);
  meetings_.erase(entry);
  if (key.first == StoreOp::all_gather) {
    const auto missing = absent(meeting.members, &meeting);
    failed_gathers_[key] = {cause, std::set<std::int32_t>(missing.begin(), missing.end())};
    for (const auto& [member, who] : meeting.present) forget_arrival(key.second, member);
  }
  for (const auto& [member, who] : meeting.present) {
    answers.push_back({who.first, {cause, 0, {}}});
    unpark(who.first);
  }
}

void StoreTable::park(Ticket ticket, const Request& request, TimePoint now) {
  Parked parked;
  parked.op = request.op;
  parked.keys.assign(request.keys.begin(), request.keys.end());
  parked.since = now;
  parked.deadline = request.timeout < Duration::zero() || request.timeout > TimePoint::max() - now
                        ? TimePoint::max()
                        : now + request.timeout;
  if (parked.deadline != TimePoint::max()) deadlines_.emplace(parked.deadline, ticket);
  parked_.emplace(ticket, std::move(parked));
}

void StoreTable::unpark(Ticket ticket) {
  const auto entry = parked_.find(ticket);
  if (entry == parked_.end()) return;
  const Parked& parked = entry->second;
  deadlines_.erase({parked.deadline, ticket});
  const auto forget = [&](auto& map, const std::string& key) {
    const auto found = map.find(key);
    if (found == map.end()) return;
    auto& list = found->second;
    list.erase(std::remove(list.begin(), list.end(), ticket), list.end());
    if (list.empty()) map.erase(found);
  };
  if (parked.op == StoreOp::register_member) {
    // `depart` has taken it off the list
  } else if (parked.op == StoreOp::queue_pop) {
    forget(queue_waiters_, parked.keys[0]);
  } else if (parked.op != StoreOp::barrier && parked.op != StoreOp::all_gather) {
    forget(awaited_, parked.keys[parked.at]);
  }
  parked_.erase(entry);
}

Status StoreTable::timeout_of(const Parked& parked, TimePoint now) const {
  const std::string waited = describe(now - parked.since);
  if (parked.op == StoreOp::get)
    return Status(Code::timed_out,
                  "get(" + quoted(parked.keys[0]) + "): nobody set this key within " + waited);
  if (parked.op == StoreOp::queue_pop)
    return Status(Code::timed_out, "queue_pop(" + quoted(parked.keys[0]) +
                                       "): nothing came into the queue within " + waited);
  std::vector<std::string_view> missing;
  for (const std::string& key : parked.keys) {
    if (!values_.contains(std::string_view(key))) missing.push_back(key);
  }
  return Status(Code::timed_out,
                std::string(name_of(parked.op)) + ": " + std::to_string(missing.size()) + " of " +
                    std::to_string(parked.keys.size()) + " keys are still missing after " + waited +
                    ": " + quoted(missing));
}

void StoreTable::expire(TimePoint now, Answers& answers) {
  leases_.expire(now, answers);
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const Ticket ticket = deadlines_.begin()->second;
    const Parked& parked = parked_.at(ticket);
    if (parked.op != StoreOp::barrier && parked.op != StoreOp::all_gather) {
      answers.push_back({ticket, {timeout_of(parked, now), 0, {}}});
      unpark(ticket);
      continue;
    }
    // The first member whose deadline passes fails the meeting for all with the same cause.
    // Otherwise the next one to time out would blame the first.
    const MeetingKey key(parked.op, parked.keys[0]);
    const Meeting& meeting = meetings_.at(key);
    const std::vector<int> none;
    fail_meeting(key,
                 members_are_missing(
                     call_text(parked.op, key.second), meeting.present.size(), meeting.members,
                     now - parked.since,
                     parked.op == StoreOp::all_gather ? absent(meeting.members, &meeting) : none),
                 answers);
  }
}

std::vector<std::string> StoreTable::overdue(TimePoint now) {
  std::vector<std::string> said;
  for (auto& [key, meeting] : meetings_) {
    if (meeting.overdue > now || meeting.present.empty()) continue;
    const auto waited = now - meeting.since;
    meeting.overdue = meeting.since + 2 * waited;
    std::string text = "the store has waited " + describe(waited) + " for ";
    if (key.first == StoreOp::all_gather) {
      const auto ranks = absent(meeting.members, &meeting);
      text += (ranks.size() == 1 ? "member " : "members ") + listed(ranks) + " of " +
              std::to_string(meeting.members);
    } else {
      text += std::to_string(meeting.members - static_cast<std::int32_t>(meeting.present.size())) +
              " of " + std::to_string(meeting.members) + " members";
    }
    said.push_back(text + ", in " + std::string(name_of(key.first)) + "(" + quoted(key.second) +
                   ")");
  }
  return said;
}

TimePoint StoreTable::next_overdue() const {
  TimePoint next = TimePoint::max();
  for (const auto& [key, meeting] : meetings_)
    if (!meeting.present.empty()) next = std::min(next, meeting.overdue);
  return next;
}

void StoreTable::drop(Ticket ticket, TimePoint now, Answers& answers) {
  if (leases_.drop(ticket, answers)) return;
  const auto entry = parked_.find(ticket);
  if (entry == parked_.end()) return;
  const Parked& parked = entry->second;
  if (parked.op == StoreOp::register_member) {
    const std::string text =
        "rank " + std::to_string(parked.index) +
        " has lost its connection to the store; its process has probably ended";
    const Status cause(Code::peer_failed, text, {parked.index});
    depart(parked.keys[0], parked.index, cause, answers);
    return unpark(ticket);
  }
  if (parked.op != StoreOp::barrier && parked.op != StoreOp::all_gather) return unpark(ticket);
  const MeetingKey key(parked.op, parked.keys[0]);
  const bool gather = parked.op == StoreOp::all_gather;
  const std::int32_t index = parked.index;
  const std::string waited = describe(now - parked.since);
  meetings_.at(key).present.erase(index);
  if (gather) forget_arrival(key.second, index);
  unpark(ticket);
  const std::string who =
      gather ? "rank " + std::to_string(index) : std::string("one of the members that had come");
  const std::string call = std::string(name_of(key.first)) + "(" + quoted(key.second) + "): ";
  Status cause(Code::peer_failed,
               call + who + " lost its connection to the store after " + waited +
                   " of waiting; its process has probably ended",
               gather ? std::vector<int>{index} : std::vector<int>{});
  fail_meeting(key, cause, answers);
  // The member that disconnected may come back (a restarted process) and must then start a new
  // round.
  if (const auto past = failed_gathers_.find(key); past != failed_gathers_.end() &&
                                                   past->second.unnotified.erase(index) > 0 &&
                                                   past->second.unnotified.empty())
    failed_gathers_.erase(past);
}

TimePoint StoreTable::next_deadline() const {
  return std::min(leases_.next_deadline(),
                  deadlines_.empty() ? TimePoint::max() : deadlines_.begin()->first);
}

}  // namespace muster::store
