// SPDX-License-Identifier: BSD-3-Clause
/// The store kind of etcd: where its keys lie, how its clients meet, and how it is made.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/store/etcd/client.h"
#include "core/store/request.h"
#include "muster/key_value_store.h"

namespace muster::store::etcd {

/// The length before it keeps one key's records from beginning like another's.
inline std::string counted(std::string_view text, std::size_t size) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%08zx", size);
  return std::string(digits.data(), 8) + std::string(text);
}

struct Keys {
  std::string root;

  std::string users() const { return root + "k"; }
  std::string user(std::string_view key) const { return users() + std::string(key); }
  std::string queue(std::string_view key) const {
    return root + "q" + counted(key, key.size()) + "/";
  }
  std::string meeting(char kind, std::string_view key) const {
    return root + kind + counted(key, key.size()) + "/";
  }
  /// Pieces of the value that is under `place`, one of the above.
  std::string pieces(std::string_view place) const { return pieces(place, place.size()) + "/"; }
  /// The prefix of the pieces of all places that have `size` bytes and begin with `place`.
  std::string pieces(std::string_view place, std::size_t size) const {
    return root + "p" + counted(place.substr(root.size()), size - root.size());
  }
};

// Barrier and all_gather among the clients of an etcd cluster, with the rules of `StoreTable`.
//
// A meeting's rounds are numbered. Each member puts one key under the round's prefix, with a lease
// of its client, and watches one key, which says how the round has ended. The member that
// completes a round, gives up or finds that another has died writes it; etcd's transactions decide
// which of them is first.

/// A lease that is kept alive as long as it is in use. Thread-safe.
class LiveLease {
 public:
  explicit LiveLease(EtcdClient& client) : client_(client) {}
  /// The lease, granted, prolonged or as it is.
  Result<std::int64_t> get(TimePoint deadline);
  /// How soon `get` wants to be called again, and at most how long a dead member seems alive.
  static constexpr Duration kPulse = std::chrono::seconds(2);
  static constexpr std::int64_t kSeconds = 8;

 private:
  EtcdClient& client_;
  std::mutex
      mutex_;  // guards all below; held during the request, so that one thread renews for all
  std::int64_t id_ = 0;
  TimePoint fresh_until_{};
  TimePoint dead_at_{};
};

/// One member's participation in one meeting.
class EtcdMeeting {
 public:
  EtcdMeeting(const Request& request, const Keys& keys, Writer& writer, LiveLease& lease);
  /// Blocks up to the request's timeout; up to `hard_deadline` for etcd's last answers.
  Reply run(TimePoint deadline, TimePoint hard_deadline);

 private:
  struct MeetingState;
  enum class MeetingArrival : std::uint8_t { arrived, again, over };

  Status read_state(MeetingState& state);
  /// Joins the round of `state`; `over`: `reply_` holds the reason why it cannot.
  MeetingArrival arrive(const MeetingState& state);
  MeetingArrival settle_unnotified(const MeetingState& state);
  MeetingArrival taken(const MeetingState& state, const OperationReply& own);
  Status check_members(const MeetingState& state, const OperationReply& others);
  /// Waits until the round is over and fills `reply_`.
  Status await_end(TimePoint deadline);
  /// Ends the round if all have come or one has gone.
  Status look_after();
  /// Ends the round as it stands in `state`. Writes nothing if it has ended or a member has
  /// arrived.
  Status end(const MeetingState& state, std::int64_t seen, const Status& outcome,
             std::int64_t complete_at);
  Status give_up(Duration waited);
  /// Fills `reply_` if the round has ended.
  Result<bool> finished();
  void read_outcome(const MeetingState& ended);
  void leave();

  std::string state_key() const { return prefix_ + "state"; }
  /// There as long as those that missed a round are to be told so.
  std::string late_key() const { return prefix_ + "late"; }
  /// How a round has ended.
  std::string end_key(std::uint64_t round) const;
  std::string round_prefix(std::uint64_t round) const;
  std::string presence_prefix() const;
  Result<std::vector<KeyValue>> presence(std::int64_t revision, bool keys_only,
                                         std::int64_t* seen = nullptr);
  std::vector<int> missing(const std::vector<KeyValue>& present) const;
  std::string call() const;

  const Request& request_;
  const Keys& keys_;
  Writer& writer_;
  LiveLease& lease_;
  const std::string prefix_;
  std::string name_;  // of this member within a round
  std::uint64_t round_ = 0;
  std::string own_key_;
  std::int64_t arrived_at_ = 0;
  std::set<std::string> known_;
  TimePoint hard_deadline_{};
  TimePoint ghost_until_ = TimePoint::max();
  Reply reply_;
};

}  // namespace muster::store::etcd

// The store kind on a client that is there already.

namespace muster::store {

/// As make_etcd_store, without asking whether the cluster answers.
std::shared_ptr<Store> make_etcd_store_over(std::shared_ptr<etcd::EtcdClient> client,
                                            std::string prefix, Duration timeout);

}  // namespace muster::store
