// SPDX-License-Identifier: BSD-3-Clause
/// Key-value stores with torch's names and with errors as exceptions. Each wraps a `store::Store`
/// (key_value_store.h), which does the work. Methods are virtual so that a plugin needs no symbol
/// of the program that loads it.
///
/// All calls are thread-safe. Values are arbitrary bytes, up to 1 GiB each; keys likewise, up to 16
/// KiB. One request, with everything it carries, may have up to 1088 MiB. An absent `timeout`
/// argument means `timeout()`, which is 300 s at first; a negative one means no limit.
///
/// Errors: DistStoreError for what the store refuses (add on a value that is no number, delete_key
/// on a FileStore) and for a timeout (Code::timed_out; the error names the keys and the time
/// waited). DistNetworkError if the server is gone or rejects this process's secret. DistError
/// (Code::invalid_argument) for keys, values and numbers beyond the limits; nothing is sent then.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/clock.h"
#include "muster/errors.h"
#include "muster/key_value_store.h"

namespace muster {

/// A non-blocking queue_pop found the queue empty.
class QueueEmptyError : public DistStoreError {
 public:
  using DistStoreError::DistStoreError;
};

class Store {
 public:
  using Keys = std::vector<std::string>;
  virtual ~Store() = default;

  /// Stores `value`, overwriting any earlier one.
  virtual void set(std::string_view key, std::string_view value);
  /// Blocks until the key exists.
  virtual std::string get(std::string_view key);
  /// Adds `amount` to the decimal number stored (0 if missing) and returns the sum. DistStoreError
  /// if the value is no number or the sum exceeds 64 bits.
  virtual std::int64_t add(std::string_view key, std::int64_t amount);
  /// Writes `desired_value` if the stored value equals `expected_value`, or if the key is missing
  /// and `expected_value` is empty. Returns the value stored afterwards; if the key is missing and
  /// `expected_value` is not empty, writes nothing and returns `expected_value`.
  virtual std::string compare_set(std::string_view key, std::string_view expected_value,
                                  std::string_view desired_value);
  /// Blocks until all keys exist. A timeout error names the missing ones.
  virtual void wait(const Keys& keys, std::optional<Duration> timeout = {});
  /// On a TCPStore, the count includes the key that coordinates its workers.
  virtual std::int64_t num_keys();
  /// Returns whether the key existed. A FileStore throws.
  virtual bool delete_key(std::string_view key);
  /// Sets the timeout of later calls on this object only. On a PrefixStore, sets that of the
  /// underlying store.
  virtual void set_timeout(Duration timeout);
  virtual Duration timeout() const;

  /// Returns whether all keys exist. Never waits for them.
  virtual bool check(const Keys& keys);
  /// Appends `value` to the stored bytes; creates the key if it is missing.
  virtual void append(std::string_view key, std::string_view value);
  /// Blocks until all keys exist.
  virtual std::vector<std::string> multi_get(const Keys& keys);
  /// Stores all values in one atomic step (EtcdStore: 60 keys a step); needs one value per key.
  virtual void multi_set(const Keys& keys, const std::vector<std::string>& values);
  /// Queues and keys have separate namespaces.
  virtual void queue_push(std::string_view key, std::string_view value);
  /// First in, first out across all clients. With `block`, waits for a value; without, throws
  /// QueueEmptyError if the queue is empty.
  virtual std::string queue_pop(std::string_view key, bool block = true);
  virtual std::int64_t queue_len(std::string_view key);
  virtual std::vector<std::string> list_keys();
  /// Another client of the same data, with its own connection if the store uses connections.
  virtual std::shared_ptr<Store> clone();
  /// Returns once `members` clients have called it with this key.
  virtual void barrier(std::string_view key, int members, std::optional<Duration> timeout = {});
  /// Each member contributes a value under its index, from 0, and receives all of them in order. On
  /// a timeout, `ranks()` of the error lists the missing indices.
  virtual std::vector<std::string> all_gather(std::string_view key, int index, int members,
                                              std::string_view value,
                                              std::optional<Duration> timeout = {});

  /// The wrapped store. Never null.
  const std::shared_ptr<store::Store>& engine() const { return engine_; }

  /// Wraps a store of the torch-free half.
  explicit Store(std::shared_ptr<store::Store> engine);

 private:
  std::shared_ptr<store::Store> engine_;
};

struct TCPStoreOptions {
  /// Number of clients, including the server's own; absent or negative: any number.
  std::optional<int> world_size = {};
  bool is_master = false;
  Duration timeout = store::kDefaultTimeout;
  bool wait_for_workers = true;
  bool multi_tenant = false;
  /// Master only (an error elsewhere): serve on this bound TCP socket. `port` must be its port or
  /// 0. The constructor takes ownership immediately. The socket is closed with the server; at once
  /// if the constructor throws or if `multi_tenant` finds an existing server.
  std::optional<int> master_listen_fd = {};
};

/// A store on a TCP server, which one process, the master, hosts.
class TCPStore : public Store {
 public:
  /// On the master, port 0 picks a free port. Blocks until the server is reachable; with
  /// `wait_for_workers` and a world size, the master also waits for all clients. One timeout covers
  /// all of it.
  TCPStore(std::string host_name, std::uint16_t port, const TCPStoreOptions& options = {});
  const std::string& host() const;
  std::uint16_t port() const;
};

/// A store in a file that all clients can open. The last of `world_size` clients to be destroyed
/// removes the file; with a negative `world_size` the file stays.
class FileStore : public Store {
 public:
  explicit FileStore(std::string file_name, int world_size = -1);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct EtcdStoreOptions {
  /// Prefix of all keys in etcd; stores with the same prefix share their keys. Keys outlive the
  /// job, so use a different prefix for each run.
  std::string prefix = "muster";
  Duration timeout = store::kDefaultTimeout;
  /// Empty: MUSTER_ETCD_USER, MUSTER_ETCD_PASSWORD, MUSTER_ETCD_CACERT, MUSTER_ETCD_CERT and
  /// MUSTER_ETCD_KEY, else none. The last three are paths of PEM files.
  std::string user = {};
  std::string password = {};
  std::string authority_file = {};
  std::string certificate_file = {};
  std::string key_file = {};
};

/// A store in an etcd cluster (server 3.4 or later, its v3 JSON gateway). Survives the death of any
/// minority of the cluster's members. Values of more than 512 KiB are stored in pieces.
class EtcdStore : public Store {
 public:
  /// `endpoints`: "host:2379" or "https://host:2379", several members of one cluster with commas
  /// between them. DistNetworkError if the cluster rejects this user or certificate; DistStoreError
  /// if it does not answer in time.
  explicit EtcdStore(const std::string& endpoints, const EtcdStoreOptions& options = {});
};

/// A store in the memory of this process, for threads.
class HashStore : public Store {
 public:
  HashStore();
};

/// Prepends `prefix` and "/" to every key of another store.
class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);
  const std::shared_ptr<Store>& underlying_store() const { return store_; }

 private:
  std::shared_ptr<Store> store_;
};

}  // namespace muster
