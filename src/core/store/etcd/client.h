/// A client of an etcd cluster: blocking calls with deadlines, over as many members as are named.
#pragma once

#include <functional>
#include <memory>
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

  Result<TxnReply> txn(const Txn& txn, TimePoint deadline);
  /// A lease of `ttl_s` seconds, at least etcd's floor (about 2 s).
  Result<EtcdLease> grant(std::int64_t ttl_s, TimePoint deadline);
  /// Code::closed: the lease has ended.
  Result<EtcdLease> keep_alive(std::int64_t lease, TimePoint deadline);
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

  /// "etcd at http://a:2379".
  std::string name() const { return session_.name(); }

 private:
  Result<std::string> post(const char* path, std::string body, TimePoint deadline);
  Status timed_out(const std::string& trouble) const;

  EtcdSession session_;
  ConnectionPool connections_;
};

/// The options that the variables MUSTER_ETCD_* give, for `endpoints` separated by commas.
ClientOptions options_from_environment(const std::string& endpoints);

}  // namespace muster::store::etcd
