// SPDX-License-Identifier: BSD-3-Clause
/// A store's contents and its blocked requests: the state machine behind the hash store and the TCP
/// server.
///
/// No I/O, no clock, no locks: requests and the time go in, answers come out. A request that cannot
/// be answered yet is parked under its caller's ticket until it can be answered, its deadline
/// passes (`expire`) or its caller disconnects (`drop`).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/store/request.h"
#include "core/store/server/lease_table.h"
#include "muster/clock.h"

namespace muster::store {

class StoreTable {
 public:
  using Ticket = store::Ticket;
  using TicketReply = store::TicketReply;
  using Answers = store::Answers;

  /// Answers `request` or parks it. Appends to `answers` its reply and the replies of requests it
  /// unblocked.
  void submit(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  /// Answers every request whose deadline has passed.
  void expire(TimePoint now, Answers& answers);
  /// The caller has disconnected. The other members of its barrier or all_gather get an error,
  /// because they cannot complete without it.
  void drop(Ticket ticket, TimePoint now, Answers& answers);
  /// The earliest deadline of parked requests; max if none.
  TimePoint next_deadline() const;
  /// Log messages about meetings that have waited 10 s for members, then 20 s, and so on, with the
  /// missing members. Each is returned once.
  std::vector<std::string> overdue(TimePoint now);
  /// When `overdue` next returns a message; max if never.
  TimePoint next_overdue() const;
  std::size_t parked() const { return parked_.size(); }
  /// Whether ranks of a job, or that join one, are there.
  bool has_ranks() const { return !jobs_.empty(); }
  /// Whether somebody who has not come yet will be told why a meeting failed.
  bool has_news_for_late_ranks() const { return !failed_gathers_.empty(); }
  std::size_t keys() const { return values_.size(); }
  /// Null where the key is missing.
  Value find(std::string_view key) const;
  struct QueueLoad {
    std::size_t entries = 0, bytes = 0;
  };
  QueueLoad queue_load(std::string_view key) const;
  const LeaseTable& leases() const { return leases_; }

 private:
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  template <class T>
  using TextMap = std::unordered_map<std::string, T, TextHash, std::equal_to<>>;
  using MutableValue = std::shared_ptr<std::string>;

  struct Parked {
    StoreOp op = StoreOp::get;
    std::vector<std::string> keys;
    std::size_t at = 0;  // get, wait, multi_get: index of the key it waits for
    std::int32_t index = 0;
    TimePoint since;
    TimePoint deadline;
  };
  /// A barrier or all_gather in progress.
  struct Meeting {
    std::int32_t members = 0;
    // A barrier numbers its members in order of arrival.
    std::map<std::int32_t, std::pair<Ticket, Value>> present;
    std::int32_t next_index = 0;
    TimePoint since = {};
    TimePoint overdue = {};
  };
  /// The outcome of a failed all_gather, kept for members that have not arrived yet: they fail
  /// immediately.
  struct FailedGather {
    Status cause;
    std::set<std::int32_t> unnotified;
  };
  using MeetingKey = std::pair<StoreOp, std::string>;
  /// The members of a job, by the prefix of its keys. A member that disconnects is named in every
  /// meeting of all members that needs it. If several are missing, the first to go is named: the
  /// others may have ended because of it. Before the job exists, its members are registered with
  /// the meeting in which they join it.
  struct JobMembers {
    std::int32_t members = 0;
    std::map<std::int32_t, Ticket> present;
    std::vector<std::pair<std::int32_t, Status>> gone;  // the first to go is first
  };

  Reply leave(const Request& request, Answers& answers);
  Reply execute(const Request& request, Answers& answers);
  Reply add(std::string_view key, std::int64_t amount, Answers& answers);
  Reply compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                    Answers& answers);
  Reply append(std::string_view key, std::string_view value, Answers& answers);
  Reply queue_push(std::string_view key, std::string_view value, Answers& answers);
  /// Stores the value and unblocks requests that waited for the key.
  void put(std::string_view key, std::string_view value, Answers& answers);

  void park(Ticket ticket, const Request& request, TimePoint now);
  void unpark(Ticket ticket);
  /// Finds the next missing key from `at`; if none, the reply is complete.
  bool find_missing(Parked& parked) const;
  Reply found(const Parked& parked) const;
  void submit_waiting(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void submit_pop(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void submit_meeting(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void submit_member(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void depart(const std::string& job, std::int32_t index, const Status& cause, Answers& answers);
  void depart_while_joining(const std::string& key, std::int32_t index, const Status& cause,
                            Answers& answers);
  void forget_arrival(const std::string& key, std::int32_t index);
  /// All ranks have joined: the members that are registered with the meeting now are with the job.
  void settle_members(const std::string& key, const Meeting& complete);
  /// Why a meeting of `members` under `key` cannot complete, or ok.
  Status absence(std::string_view key, std::int32_t members, const Meeting* meeting,
                 std::int32_t self) const;
  void fail_meeting(const MeetingKey& key, const Status& cause, Answers& answers);
  Status timeout_of(const Parked& parked, TimePoint now) const;
  static std::vector<int> absent(std::int32_t members, const Meeting* meeting);

  TextMap<MutableValue> values_;
  TextMap<std::deque<Value>> queues_;  // no entry is empty
  // Each parked ticket is also in exactly one of `awaited_`, `queue_waiters_`, a meeting or a job,
  // and in `deadlines_` if it has a deadline.
  std::unordered_map<Ticket, Parked> parked_;
  std::set<std::pair<TimePoint, Ticket>> deadlines_;
  TextMap<std::vector<Ticket>> awaited_;       // key -> requests that wait for it now
  TextMap<std::deque<Ticket>> queue_waiters_;  // first come, first served
  std::map<MeetingKey, Meeting> meetings_;
  std::map<MeetingKey, FailedGather> failed_gathers_;
  std::map<std::string, JobMembers> jobs_;  // and meetings in which ranks join one
  std::int64_t joins_ = 0;
  LeaseTable leases_;
};

}  // namespace muster::store
