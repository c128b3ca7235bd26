// SPDX-License-Identifier: BSD-3-Clause
/// Leases on names, and the records of epochs: what a job's membership needs from a store's server
/// (`jobs/membership/membership.h`). A state machine like `StoreTable`: no I/O, no clock, no
/// locks.
///
///   hold     name, value; number 0: take the name for `timeout`; the number of our lease: give the
///            name another value. Answered with the lease's number
///   renew    name; number: the lease, which then lasts `timeout` longer. A lease ends after its
///            time only where `expire` is called in time: a server that stood still could not be
///            renewed with, so its leases begin their time anew, `kExcusedPauses` times in a row
///   stay     name; number: the lease. Waits for ever: when its connection ends, so does the lease
///   release  name; number: the lease
///   watch    prefix, name of a record; number: the revision that is known (0: none). Waits for
///            news; its answer has the revision and the news (`encode(LeaseNews)`), which are empty
///            after `timeout`
///   commit   name of a record; the number of the epoch in decimal, the record; number: the
///   revision
///            of the record that is to be replaced (0: none). Answered with the new revision
///   enter    name of a record; number: an epoch. Its connection is refused from the moment that
///            the record has a later one (`StoreServer` sees to that)
///
/// Every change has a revision number. The table keeps the last change of each name, and tombstones
/// of the last few thousand names that are gone. A watcher whose known revision is older than that
/// gets a snapshot.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/time/clock.h"
#include "core/store/request.h"
#include "muster/clock.h"

namespace muster::store {

/// The news a watcher receives.
struct LeaseNews {
  struct Item {
    enum class Kind : std::uint8_t {
      gone = 0,  ///< let go, or the connection that stayed has ended
      held = 1,
      record = 2,
      silent = 3  ///< its time ran out: its holder may live
    };
    Kind kind = Kind::gone;
    std::string name;
    std::int64_t revision = 0;  ///< held: of the beginning of the lease; record: of the commit
    std::string value;          ///< empty for names that are gone
  };
  bool snapshot = false;
  std::vector<Item> items;
};
std::string encode(const LeaseNews& news);
Result<LeaseNews> decode_lease_news(std::string_view bytes);

class LeaseTable {
 public:
  static bool serves(StoreOp op);
  void submit(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  void expire(TimePoint now, Answers& answers);
  /// The connection of a waiting request has ended. False: no such request waits here.
  bool drop(Ticket ticket, Answers& answers);
  TimePoint next_deadline() const;
  /// The epoch that was committed to `record`; 0: none.
  std::int64_t epoch_of(std::string_view record) const;
  /// The error for requests of an older epoch.
  Status refusal_of(std::string_view record, std::int64_t epoch) const;

 private:
  struct Entry {
    Value value;
    std::int64_t since = 0;     // revision at which the lease began
    std::int64_t revision = 0;  // of the last change
    std::uint64_t lease = 0;    // 0: a record
    std::int64_t epoch = 0;     // of a record
  };
  struct Lease {
    std::string name;
    TimePoint deadline = TimePoint::max();
    Duration lasts{-1};  // without a renewal; negative: for ever
    OwnPauses pauses{};  // of the server, since the holder last renewed it
    std::optional<Ticket> staying = std::nullopt;
  };
  struct Tombstone {
    std::int64_t revision = 0;
    LeaseNews::Item::Kind end = LeaseNews::Item::Kind::gone;
  };
  struct LeaseWatcher {
    std::string prefix, record;
    std::int64_t known = 0;
    TimePoint deadline = TimePoint::max();
  };

  Reply hold(const Request& request, TimePoint now);
  Reply renew(const Request& request, TimePoint now);
  Reply release(const Request& request, Answers& answers);
  Reply commit(const Request& request);
  void submit_stay(Ticket ticket, const Request& request, Answers& answers);
  void submit_watch(Ticket ticket, const Request& request, TimePoint now, Answers& answers);
  Lease* lease_of(const Request& request);
  Status no_lease(const Request& request) const;
  void extend(std::uint64_t number, Lease& lease, Duration by, TimePoint now);
  bool stood_still(TimePoint now) const;
  void excuse_own_pause(TimePoint now);
  /// `end`: gone or silent.
  void end_lease(std::uint64_t number, LeaseNews::Item::Kind end, const Status& answer,
                 Answers& answers);
  void note_change(const std::string& name, std::int64_t before);
  std::optional<LeaseNews> news_for(const LeaseWatcher& watcher) const;
  void tell_watchers(Answers& answers);
  void answer_watcher(Ticket ticket, const LeaseNews& news, Answers& answers);

  // Every entry's revision, and every tombstone's, is a key of `changes_`; a name has one of the
  // two at most. Every lease is in `lease_ends_` under its deadline.
  std::int64_t revision_ = 1;  // 0: the known revision of a new watcher
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::int64_t, std::string> changes_;            // the last one of each name
  std::unordered_map<std::string, Tombstone> tombstones_;  // names that are gone
  std::set<std::int64_t> tombstone_order_;
  std::int64_t forgotten_ = 0;  // up to here tombstones have been dropped
  std::unordered_map<std::uint64_t, Lease> leases_;
  std::set<std::pair<TimePoint, std::uint64_t>> lease_ends_;
  std::uint64_t next_lease_ = 1;
  std::unordered_map<Ticket, std::uint64_t> staying_;
  std::unordered_map<Ticket, LeaseWatcher> watchers_;
  std::set<std::pair<TimePoint, Ticket>> watcher_ends_;
  std::int64_t told_ = 1;  // watchers know of everything up to here
};

}  // namespace muster::store
