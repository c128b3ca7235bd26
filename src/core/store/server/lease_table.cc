// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/server/lease_table.h"

#include <algorithm>
#include <charconv>

#include "core/base/bytes.h"

namespace muster::store {

using Kind = LeaseNews::Item::Kind;

namespace {

constexpr std::size_t kTombstones = 4096;  // limit: memory
// The part of a lease's time by which no server is late that runs.
constexpr int kSlackParts = 8;  // limit: as the holder's own (jobs/membership/renewal.h)

TimePoint after(TimePoint now, Duration timeout) {
  return timeout < Duration::zero() || timeout > TimePoint::max() - now ? TimePoint::max()
                                                                        : now + timeout;
}

bool covers(std::string_view prefix, std::string_view record, std::string_view name) {
  return name == record || name.starts_with(prefix);
}

}  // namespace

std::string encode(const LeaseNews& news) {
  ByteWriter writer;
  writer.put(static_cast<std::uint8_t>(news.snapshot))
      .put(static_cast<std::uint32_t>(news.items.size()));
  for (const LeaseNews::Item& item : news.items) {
    writer.put(static_cast<std::uint8_t>(item.kind))
        .put(item.revision)
        .put_text(item.name)
        .put_text(item.value);
  }
  return writer.take();
}

Result<LeaseNews> decode_lease_news(std::string_view bytes) {
  ByteReader reader(bytes);
  LeaseNews news;
  const auto snapshot = reader.get<std::uint8_t>();
  const auto count = reader.get<std::uint32_t>();
  bool known = snapshot <= 1;
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    LeaseNews::Item item;
    const auto kind = reader.get<std::uint8_t>();
    known = known && kind <= static_cast<std::uint8_t>(Kind::silent);
    item.kind = static_cast<Kind>(kind);
    item.revision = reader.get<std::int64_t>();
    item.name = reader.get_text();
    item.value = reader.get_text();
    if (reader.ok()) news.items.push_back(std::move(item));
  }
  if (!reader.at_end() || !known)
    return Status(Code::network, "the store's server sent malformed news of the job's members");
  news.snapshot = snapshot == 1;
  return news;
}

bool LeaseTable::serves(StoreOp op) {
  return op == StoreOp::hold || op == StoreOp::renew || op == StoreOp::stay ||
         op == StoreOp::release || op == StoreOp::watch || op == StoreOp::commit;
}

void LeaseTable::submit(Ticket ticket, const Request& request, TimePoint now, Answers& answers) {
  if (request.op == StoreOp::stay) return submit_stay(ticket, request, answers);
  if (request.op == StoreOp::watch) return submit_watch(ticket, request, now, answers);
  Reply reply;
  switch (request.op) {
    case StoreOp::hold: reply = hold(request, now); break;
    case StoreOp::renew: reply = renew(request, now); break;
    case StoreOp::release: reply = release(request, answers); break;
    case StoreOp::commit: reply = commit(request); break;
    default: reply.status = Status(Code::internal, "no request for the table of leases");
  }
  answers.push_back({ticket, std::move(reply)});
  tell_watchers(answers);
}

Reply LeaseTable::hold(const Request& request, TimePoint now) {
  const std::string name(request.keys[0]);
  const auto value = std::make_shared<const std::string>(request.values[0]);
  if (request.number != 0) {
    Lease* lease = lease_of(request);
    if (lease == nullptr) return {no_lease(request), 0, {}};
    Entry& entry = entries_.at(name);
    entry.value = value;
    note_change(name, std::exchange(entry.revision, revision_ + 1));
    lease->pauses.reset();
    extend(static_cast<std::uint64_t>(request.number), *lease, request.timeout, now);
    return {{}, request.number, {}};
  }
  if (const auto held = entries_.find(name); held != entries_.end()) {
    return {Status(Code::refused, "the name " + quoted(request.keys[0]) + " is held already" +
                                      (held->second.lease == 0 ? ", as a record" : "")),
            0,
            {}};
  }
  const std::uint64_t number = next_lease_++;
  Lease& lease = leases_.emplace(number, Lease{.name = name}).first->second;
  lease_ends_.emplace(lease.deadline, number);
  extend(number, lease, request.timeout, now);
  note_change(name, 0);
  entries_.emplace(name, Entry{value, revision_, revision_, number, 0});
  return {{}, static_cast<std::int64_t>(number), {}};
}

Reply LeaseTable::renew(const Request& request, TimePoint now) {
  Lease* lease = lease_of(request);
  if (lease == nullptr) return {no_lease(request), 0, {}};
  lease->pauses.reset();
  extend(static_cast<std::uint64_t>(request.number), *lease, request.timeout, now);
  return {{}, request.number, {}};
}

Reply LeaseTable::release(const Request& request, Answers& answers) {
  if (lease_of(request) == nullptr) return {{}, 0, {}};
  end_lease(static_cast<std::uint64_t>(request.number), Kind::gone, {}, answers);
  return {{}, 1, {}};
}

Reply LeaseTable::commit(const Request& request) {
  const std::string name(request.keys[0]);
  std::int64_t epoch = 0;
  const std::string_view text = request.values[0];
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), epoch);
  if (error != std::errc() || stop != text.data() + text.size() || epoch < 1)
    return {Status(Code::invalid_argument, "commit: " + quoted(text) + " is no number of an epoch"),
            0,
            {}};
  const auto present = entries_.find(name);
  const bool is_record = present != entries_.end() && present->second.lease == 0;
  if (present != entries_.end() && !is_record)
    return {
        Status(Code::refused, "commit: " + quoted(name) + " is a name that a node holds"), 0, {}};
  const std::int64_t revision = is_record ? present->second.revision : 0;
  const std::int64_t number = is_record ? present->second.epoch : 0;
  if (revision != request.number || epoch <= number) {
    return {Status(Code::refused,
                   "epoch " + std::to_string(epoch) + " was not committed: the job is at epoch " +
                       std::to_string(number) + ", revision " + std::to_string(revision) +
                       ", and revision " + std::to_string(request.number) + " was expected"),
            0,
            {}};
  }
  note_change(name, revision);
  Entry& entry = entries_[name];
  entry =
      Entry{std::make_shared<const std::string>(request.values[1]), revision_, revision_, 0, epoch};
  return {{}, revision_, {}};
}

void LeaseTable::submit_stay(Ticket ticket, const Request& request, Answers& answers) {
  Lease* lease = lease_of(request);
  if (lease == nullptr || lease->staying)
    return void(answers.push_back({ticket, {no_lease(request), 0, {}}}));
  lease->staying = ticket;
  staying_.emplace(ticket, static_cast<std::uint64_t>(request.number));
}

void LeaseTable::submit_watch(Ticket ticket, const Request& request, TimePoint now,
                              Answers& answers) {
  const LeaseWatcher watcher{std::string(request.keys[0]), std::string(request.keys[1]),
                             request.number, after(now, request.timeout)};
  if (const auto news = news_for(watcher)) return answer_watcher(ticket, *news, answers);
  watcher_ends_.emplace(watcher.deadline, ticket);
  watchers_.emplace(ticket, watcher);
}

LeaseTable::Lease* LeaseTable::lease_of(const Request& request) {
  const auto lease = leases_.find(static_cast<std::uint64_t>(request.number));
  return lease == leases_.end() || lease->second.name != request.keys[0] ? nullptr : &lease->second;
}

Status LeaseTable::no_lease(const Request& request) const {
  return Status(Code::refused,
                std::string(name_of(request.op)) + ": this process no longer holds the name " +
                    quoted(request.keys[0]) + ": it said nothing for longer than it had promised");
}

void LeaseTable::extend(std::uint64_t number, Lease& lease, Duration by, TimePoint now) {
  lease_ends_.erase({lease.deadline, number});
  lease.lasts = by;
  lease.deadline = after(now, by);
  lease_ends_.emplace(lease.deadline, number);
}

/// A lease's end that is noticed late tells of a pause of this process.
bool LeaseTable::stood_still(TimePoint now) const {
  for (const auto& [deadline, number] : lease_ends_) {
    if (deadline > now) break;
    if (now - deadline > leases_.at(number).lasts / kSlackParts) return true;
  }
  return false;
}

/// No lease could be renewed while this process stood still, and what was sent meanwhile may not
/// have been read yet: all leases get their time again.
void LeaseTable::excuse_own_pause(TimePoint now) {
  if (!stood_still(now)) return;
  for (auto& [each, lease] : leases_) {
    if (lease.pauses.excuse()) extend(each, lease, lease.lasts, now);
  }
}

void LeaseTable::end_lease(std::uint64_t number, Kind end, const Status& answer, Answers& answers) {
  const auto entry = leases_.find(number);
  const Lease lease = std::move(entry->second);
  leases_.erase(entry);
  lease_ends_.erase({lease.deadline, number});
  if (lease.staying) {
    staying_.erase(*lease.staying);
    answers.push_back({*lease.staying, {answer, 0, {}}});
  }
  const auto held = entries_.find(lease.name);
  const std::int64_t before = held->second.revision;
  entries_.erase(held);
  note_change(lease.name, before);
  tombstones_[lease.name] = {revision_, end};
  tombstone_order_.insert(revision_);
  if (tombstone_order_.size() <= kTombstones) return;
  forgotten_ = *tombstone_order_.begin();
  tombstones_.erase(changes_.at(forgotten_));
  changes_.erase(forgotten_);
  tombstone_order_.erase(tombstone_order_.begin());
}

/// The next revision is a change of `name`, whose last one was `before` (0: none but a tombstone).
void LeaseTable::note_change(const std::string& name, std::int64_t before) {
  if (const auto grave = tombstones_.find(name); grave != tombstones_.end()) {
    before = grave->second.revision;
    tombstone_order_.erase(before);
    tombstones_.erase(grave);
  }
  if (before > 0) changes_.erase(before);
  changes_.emplace(++revision_, name);
}

std::optional<LeaseNews> LeaseTable::news_for(const LeaseWatcher& watcher) const {
  LeaseNews news;
  const auto tell = [&](const std::string& name) {
    const auto entry = entries_.find(name);
    if (entry == entries_.end()) {
      const auto grave = tombstones_.find(name);
      news.items.push_back(
          {grave == tombstones_.end() ? Kind::gone : grave->second.end, name, 0, {}});
      return;
    }
    const Entry& it = entry->second;
    if (it.lease == 0 && name != watcher.record) return;  // the record of another job
    news.items.push_back({it.lease == 0 ? Kind::record : Kind::held, name,
                          it.lease == 0 ? it.revision : it.since, *it.value});
  };
  if (watcher.known == 0 || watcher.known < forgotten_) {
    news.snapshot = true;
    for (auto entry = entries_.lower_bound(watcher.prefix);
         entry != entries_.end() && entry->first.starts_with(watcher.prefix); ++entry) {
      if (entry->first != watcher.record) tell(entry->first);
    }
    if (entries_.contains(watcher.record)) tell(watcher.record);
    return news;
  }
  for (auto change = changes_.upper_bound(watcher.known); change != changes_.end(); ++change) {
    if (covers(watcher.prefix, watcher.record, change->second)) tell(change->second);
  }
  if (news.items.empty()) return std::nullopt;
  return news;
}

void LeaseTable::answer_watcher(Ticket ticket, const LeaseNews& news, Answers& answers) {
  answers.push_back({ticket, {{}, revision_, {std::make_shared<const std::string>(encode(news))}}});
}

void LeaseTable::tell_watchers(Answers& answers) {
  if (told_ == revision_) return;
  told_ = revision_;
  std::vector<Ticket> served;
  for (auto& [ticket, watcher] : watchers_) {
    const auto news = news_for(watcher);
    if (!news) {
      watcher.known = revision_;  // nothing since then concerns this watcher
      continue;
    }
    answer_watcher(ticket, *news, answers);
    served.push_back(ticket);
  }
  for (const Ticket ticket : served) {
    watcher_ends_.erase({watchers_.at(ticket).deadline, ticket});
    watchers_.erase(ticket);
  }
}

void LeaseTable::expire(TimePoint now, Answers& answers) {
  excuse_own_pause(now);
  while (!lease_ends_.empty() && lease_ends_.begin()->first <= now) {
    end_lease(lease_ends_.begin()->second, Kind::silent,
              Status(Code::refused, "this process said nothing for longer than it had promised"),
              answers);
  }
  tell_watchers(answers);
  while (!watcher_ends_.empty() && watcher_ends_.begin()->first <= now) {
    const Ticket ticket = watcher_ends_.begin()->second;
    watcher_ends_.erase(watcher_ends_.begin());
    watchers_.erase(ticket);
    answer_watcher(ticket, {}, answers);
  }
}

bool LeaseTable::drop(Ticket ticket, Answers& answers) {
  if (const auto watcher = watchers_.find(ticket); watcher != watchers_.end()) {
    watcher_ends_.erase({watcher->second.deadline, ticket});
    watchers_.erase(watcher);
    return true;
  }
  const auto staying = staying_.find(ticket);
  if (staying == staying_.end()) return false;
  const std::uint64_t number = staying->second;
  leases_.at(number).staying.reset();
  staying_.erase(staying);
  end_lease(number, Kind::gone, {}, answers);
  tell_watchers(answers);
  return true;
}

TimePoint LeaseTable::next_deadline() const {
  const auto first = [](const auto& ends) {
    return ends.empty() ? TimePoint::max() : ends.begin()->first;
  };
  return std::min(first(lease_ends_), first(watcher_ends_));
}

std::int64_t LeaseTable::epoch_of(std::string_view record) const {
  const auto entry = entries_.find(record);
  return entry == entries_.end() ? 0 : entry->second.epoch;
}

Status LeaseTable::refusal_of(std::string_view record, std::int64_t epoch) const {
  return Status(Code::refused,
                "this process belongs to epoch " + std::to_string(epoch) +
                    " of the job, which is at epoch " + std::to_string(epoch_of(record)) +
                    ": its node was restarted or replaced, and what it does no longer counts");
}

}  // namespace muster::store
