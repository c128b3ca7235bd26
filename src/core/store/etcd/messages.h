// SPDX-License-Identifier: BSD-3-Clause
/// The messages of etcd's v3 API that muster uses, as values, and their JSON form as etcd's gateway
/// reads and writes it (`/v3/kv/txn`, `/v3/lease/...`, `/v3/watch`, `/v3/auth/...`).
///
/// `store/etcd/` is a client of etcd v3 and the store kind on it. `messages` and `session` are
/// byte-in, byte-out: no socket, no clock, no lock. `client` drives them over a `HttpConnection`;
/// `curl_connection` is the one that real jobs use. Keys and values are arbitrary bytes.
/// Source: etcd's api/etcdserverpb/rpc.proto, versions 3.4 to 3.6.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "muster/status.h"

namespace muster::store::etcd {

struct KeyValue {
  std::string key;
  std::string value;
  std::int64_t create_revision = 0;
  std::int64_t mod_revision = 0;
  std::int64_t version = 0;  ///< number of writes since the key was created; 0: no such key
  std::int64_t lease = 0;
};

/// A condition on one key or, with `range_end`, on every key of [key, range_end).
struct Compare {
  enum class EtcdTarget : std::uint8_t { version, create_revision, mod_revision, value };
  enum class Relation : std::uint8_t { equal, greater, less, not_equal };
  std::string key;
  EtcdTarget target = EtcdTarget::version;
  Relation relation = Relation::equal;
  std::int64_t number = 0;  ///< all targets but `value`. A missing key has 0.
  std::string value{};      ///< target `value`. No relation holds for a missing key.
  std::string range_end{};
};

/// Reads one key or, with `range_end`, the keys of [key, range_end).
struct KeyRange {
  std::string key;
  std::string range_end{};
  std::int64_t limit = 0;     ///< 0: all
  std::int64_t revision = 0;  ///< 0: the newest
  bool keys_only = false;
  bool count_only = false;
  bool oldest_first = false;  ///< in order of creation; else of keys
};
struct Put {
  std::string key;
  std::string value;
  std::int64_t lease = 0;  ///< 0: none; else the key goes when the lease ends
};
struct Delete {
  std::string key;
  std::string range_end{};
};
using Operation = std::variant<KeyRange, Put, Delete>;

/// One atomic step: `then` if every condition holds, else `otherwise`.
struct Txn {
  std::vector<Compare> when{};
  std::vector<Operation> then{};
  std::vector<Operation> otherwise{};
};

struct OperationReply {
  std::vector<KeyValue> values{};  ///< Range
  std::int64_t count = 0;          ///< Range: keys there are, whatever the limit
  std::int64_t deleted = 0;        ///< Delete
};
struct TxnReply {
  bool succeeded = false;
  std::int64_t revision = 0;  ///< of the whole key space, after this step
  std::vector<OperationReply> replies{};
};

struct EtcdLease {
  std::int64_t id = 0;
  std::int64_t ttl_s = 0;  ///< 0 in the reply to a keep-alive: the lease has ended
};

struct Event {
  bool deleted = false;
  KeyValue value;
};

/// The contents of one message of a watch.
struct WatchMessage {
  bool created = false;  ///< events from here on will come
  std::int64_t revision = 0;
  /// The watch has been ended by the server, for this reason.
  bool cancelled = false;
  std::string reason{};
  std::vector<Event> events{};
};

/// etcd's answer to a request that it did not carry out.
struct Refusal {
  int code = 0;  ///< gRPC's number: 5 not found, 7 permission denied, 14 unavailable, ...
  std::string message{};
};

/// The end of the range of all keys that begin with `prefix`.
std::string prefix_end(std::string prefix);

std::string encode(const Txn& txn);
std::string encode_grant(std::int64_t ttl_s);
/// A keep-alive or a revocation.
std::string encode_lease(std::int64_t id);
std::string encode_login(std::string_view user, std::string_view password);
/// A watch of what will happen to [key, range_end), or to one key.
std::string encode_watch(std::string_view key, std::string_view range_end);

/// Code::store if the bytes are no such reply.
Result<TxnReply> decode_txn(std::string_view json);
Result<EtcdLease> decode_grant(std::string_view json);
Result<EtcdLease> decode_keep_alive(std::string_view json);
Result<std::string> decode_token(std::string_view json);
/// One line of a watch's stream.
Result<WatchMessage> decode_watch(std::string_view json);
/// Whatever a reply without success holds; a body that is no JSON is taken as text.
Refusal decode_refusal(std::string_view body, int http_status);

}  // namespace muster::store::etcd
