// SPDX-License-Identifier: BSD-3-Clause
/// A client of an etcd cluster: blocking calls with deadlines, over as many members as are named.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/store/etcd/messages.h"
#include "core/store/etcd/session.h"
#include "core/store/http/connection.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store::etcd {

struct ClientOptions {
  /// "http://host:2379", "https://host:2379" or "host:2379" (http, or https with a file of `tls`).
  std::vector<std::string> endpoints{};
  std::string user{};
  std::string password{};
  TlsFiles tls{};
};

/// All calls are thread-safe and block up to their deadline, then fail with Code::timed_out and the
/// last reason. Code::refused: login, permission or certificate. Code::exhausted: etcd's quota.
/// Code::store: whatever else etcd did not like. Every call may be carried out twice if a member
/// fails in the middle of it.
class EtcdClient {
 public:
  /// Only checks the options; the first call connects.
  static Result<std::shared_ptr<EtcdClient>> make(ClientOptions options);
  EtcdClient(ClientOptions options, MakeConnection make_connection);

  /// `member_limit`: how long one member may take before the next is asked. By default longer than
  /// etcd itself waits for a leader.
  Result<TxnReply> txn(const Txn& txn, TimePoint deadline, Duration member_limit = kMemberLimit);
  /// A lease of `ttl_s` seconds, at least etcd's floor (about 2 s).
  Result<EtcdLease> grant(std::int64_t ttl_s, TimePoint deadline);
  /// Code::closed: the lease has ended. After each `hedge_after` without an answer one more member
  /// is asked beside those that were asked before, until all are; then the oldest request is given
  /// up and its member asked anew. The first answer counts.
  Result<EtcdLease> keep_alive(std::int64_t lease, TimePoint deadline,
                               Duration hedge_after = kMemberLimit);
  /// Ends the lease and removes its keys.
  Status revoke(std::int64_t lease, TimePoint deadline);

  struct WatchOptions {
    std::string key{};
    std::string range_end{};  ///< empty: only `key`
    TimePoint deadline{};
    /// Called each time the watch begins: what happened before does not come, so read the keys.
    /// True: return.
    std::function<bool()> on_open{};
    /// Called with what happens to the keys, in order. True: return.
    std::function<bool(const std::vector<Event>&)> on_events{};
    /// Called every `idle`. True: return. Empty: not called.
    std::function<bool()> on_idle{};
    Duration idle = std::chrono::seconds(2);
    /// Code::network once no member has kept a stream open for so long; negative: no limit. Time in
    /// which this process stood still does not count.
    Duration lost_limit{-1};
    /// A stream that has been silent for so long is opened anew, in case its other end is gone; at
    /// another member if it has never said anything.
    Duration silence_limit = std::chrono::seconds(15);  // limit: patience with one member
  };
  /// Returns once one of the functions, which are called on this thread, returns true.
  Status watch(const WatchOptions& options);

  std::size_t members() const { return session_.members(); }
  /// "etcd at http://a:2379".
  std::string name() const { return session_.name(); }

 private:
  /// etcd itself gives up a proposal after some 7 s without a leader, and says so.
  static constexpr Duration kMemberLimit = std::chrono::seconds(8);  // limit: patience with one

  Result<std::string> post(const char* path, std::string body, TimePoint deadline,
                           Duration member_limit = kMemberLimit);
  Result<std::string> post_hedged(const char* path, const std::string& body, TimePoint deadline,
                                  Duration hedge_after);
  Status timed_out(const std::string& trouble) const;

  EtcdSession session_;
  ConnectionPool connections_;
};

/// The options that the variables MUSTER_ETCD_* give, for `endpoints` separated by commas.
ClientOptions options_from_environment(const std::string& endpoints);

// Writes to etcd that happen exactly once, although `EtcdClient` may send a request twice.
//
// Each transaction also writes a key that only this writer writes, under the condition that it has
// the version which the writer remembers. A repeated transaction therefore fails, and the version
// tells that the first one has succeeded.

/// 32 random hexadecimal digits, unique in practice.
std::string random_name();

struct Written {
  bool done = false;  ///< every condition held
  /// Done by an attempt whose reply was lost: `replies` is empty.
  bool repeated = false;
  std::int64_t revision = 0;
  std::vector<OperationReply> replies{};  ///< of `then` or of `otherwise`
};

/// Thread-safe.
class Writer {
 public:
  /// `root`: what all keys of the store begin with.
  Writer(std::shared_ptr<EtcdClient> client, std::string root)
      : client_(std::move(client)), root_(std::move(root)) {}

  /// At most 127 operations in each half, as etcd allows.
  Result<Written> commit(Txn txn, TimePoint deadline);

  /// Puts a long value in pieces under `prefix`, which a transaction then refers to.
  struct Long {
    std::string stored;   ///< what the key itself is to hold
    std::string pieces;   ///< what the keys of the pieces begin with; empty: there are none
    std::string first{};  ///< the first piece; it exists as long as the pieces do
  };
  Result<Long> prepare(const std::string& prefix, std::string_view value, TimePoint deadline);
  /// The value of what `prepare` gave out. Code::closed: its pieces have been removed since.
  Result<std::string> restore(const std::string& prefix, std::string_view stored,
                              TimePoint deadline);

  EtcdClient& client() { return *client_; }

 private:
  struct WriteMark {
    std::string key;
    std::int64_t version = 0;
    std::int64_t lease = 0;
    TimePoint renew_at{};
  };
  Result<WriteMark> take_mark(TimePoint deadline);

  const std::shared_ptr<EtcdClient> client_;
  const std::string root_;
  std::mutex mutex_;  // guards `idle_`; a mark that is taken belongs to one commit
  std::vector<WriteMark> idle_;
};

}  // namespace muster::store::etcd
