/// What a store holds and who waits for what: the state machine behind the hash store and the TCP
/// server.
///
/// No I/O, no clock, no locks: requests and the time come in, answers go out. A request that cannot
/// be answered yet is parked under the ticket of whoever asked, until it can, its deadline passes
/// (`expire`) or the asker is gone (`drop`).
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

#include "muster/base/clock.h"
#include "muster/store/request.h"

namespace muster::store {

class StoreTable {
 public:
  /// Chosen by the asker; unique among those that are parked.
  using Ticket = std::uint64_t;
  struct Answer {
    Ticket ticket = 0;
    Reply reply;
  };
  using Answers = std::vector<Answer>;

  /// Answers `request` or parks it. `answers` gets everything that it brought about: its own reply,
  /// and those of others that it set free.
  void submit(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  /// Answers every request whose deadline has passed.
  void expire(TimePoint now, Answers& answers);
  /// The asker is gone and wants no answer. Those who met it in a barrier or all_gather are told:
  /// without it they cannot come to an end.
  void drop(Ticket ticket, TimePoint now, Answers& answers);
  /// The earliest deadline of the parked; max if none.
  TimePoint next_deadline() const;
  /// Sentences for a log about the meetings that have waited for members for ten seconds, and then
  /// for twice as long, and so on: who is missing. Each is said once.
  std::vector<std::string> overdue(TimePoint now);
  /// When `overdue` has something to say; max if never.
  TimePoint next_overdue() const;
  std::size_t parked() const { return parked_.size(); }
  std::size_t keys() const { return values_.size(); }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  template <class T>
  using TextMap = std::unordered_map<std::string, T, Hash, std::equal_to<>>;
  using MutableValue = std::shared_ptr<std::string>;

  struct Parked {
    Op op = Op::get;
    std::vector<std::string> keys;
    std::size_t at = 0;  // get, wait, multi_get: the key that it waits for now
    std::int32_t index = 0;
    TimePoint since;
    TimePoint deadline;
  };
  /// A barrier or all_gather on its way.
  struct Meeting {
    std::int32_t members = 0;
    std::map<std::int32_t, std::pair<Ticket, Value>>
        present;  // a barrier numbers its members as they come
    std::int32_t next_index = 0;
    TimePoint since = {};
    TimePoint overdue = {};
  };
  /// What became of a failed all_gather, kept for the members that had not come yet: they learn it
  /// at once instead of waiting in vain.
  struct Obituary {
    Status cause;
    std::set<std::int32_t> untold;
  };
  using MeetingKey = std::pair<Op, std::string>;
  /// Who attends a job (the prefix of its keys): a member that goes is named in every meeting of
  /// all members that would need it. Before there is a job, its members attend the meeting in which
  /// they join it.
  struct Attendance {
    std::int32_t members = 0;
    std::map<std::int32_t, Ticket> present;
    std::map<std::int32_t, Status> gone;
  };

  Reply execute(const Request& request, Answers& answers);
  Reply add(std::string_view key, std::int64_t amount, Answers& answers);
  Reply compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                    Answers& answers);
  Reply append(std::string_view key, std::string_view value, Answers& answers);
  Reply queue_push(std::string_view key, std::string_view value, Answers& answers);
  /// Stores and frees those who waited for the key.
  void put(std::string_view key, std::string_view value, Answers& answers);

  void park(Ticket ticket, const Request& request, TimePoint now);
  void unpark(Ticket ticket);
  /// Looks for the next missing key from `at` on; none: the reply is complete.
  bool find_missing(Parked& parked) const;
  Reply found(const Parked& parked) const;
  void submit_waiting(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void submit_pop(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void submit_meeting(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void submit_attend(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void depart(const std::string& job, std::int32_t index, Status cause, Answers& answers);
  void depart_while_joining(const std::string& key, std::int32_t index, const Status& cause,
                            Answers& answers);
  void forget_arrival(const std::string& key, std::int32_t index);
  /// All have met to join: those who attended the meeting attend the job.
  void settle_attendance(const std::string& key, const Meeting& complete);
  /// Why a meeting of `members` under `key` cannot come to its end, or success.
  Status absence(std::string_view key, std::int32_t members, const Meeting* meeting,
                 std::int32_t self) const;
  void fail_meeting(const MeetingKey& key, const Status& cause, Answers& answers);
  Status timeout_of(const Parked& parked, TimePoint now) const;
  static std::vector<int> absent(std::int32_t members, const Meeting* meeting);

  TextMap<MutableValue> values_;
  TextMap<std::deque<Value>> queues_;  // none is empty
  std::unordered_map<Ticket, Parked> parked_;
  std::set<std::pair<TimePoint, Ticket>> deadlines_;
  TextMap<std::vector<Ticket>> awaited_;       // key -> who waits for it now
  TextMap<std::deque<Ticket>> queue_waiters_;  // first come, first served
  std::map<MeetingKey, Meeting> meetings_;
  std::map<MeetingKey, Obituary> obituaries_;
  std::map<std::string, Attendance> attendances_;
  std::int64_t joins_ = 0;
};

}  // namespace muster::store
