/// Key-value stores as users see them: torch's names, errors thrown. Each wraps a `store::Store`,
/// which does the work.
///
/// All calls are thread-safe. Values are bytes, any bytes, up to 1 GiB each; keys likewise, up to
/// 16 KiB; one request with all that it carries up to 1088 MiB. Where a timeout may be given,
/// absent means `timeout()`, 300 s at first, and negative means no limit.
///
/// Errors: DistStoreError for what the store refuses (a number expected and none there, delete_key
/// on a file) and for a timeout (Code::timed_out), naming the keys and the time waited;
/// DistNetworkError where the server is gone, or refuses this process (the secret); DistError
/// (Code::invalid_argument) for keys, values and numbers beyond the limits, before anything is
/// sent.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/errors.h"
#include "muster/store/store.h"

namespace muster {

/// A queue from which nobody wanted to wait for a value had none.
class QueueEmptyError : public DistStoreError {
 public:
  using DistStoreError::DistStoreError;
};

class Store {
 public:
  using Keys = std::vector<std::string>;
  virtual ~Store() = default;

  /// Overwrites.
  void set(std::string_view key, std::string_view value);
  /// Blocks until the key is there.
  std::string get(std::string_view key);
  /// Adds to a decimal number (missing: 0) and returns the sum; DistStoreError where the value is
  /// no number or the sum is beyond 64 bits.
  std::int64_t add(std::string_view key, std::int64_t amount);
  /// Writes where the value is `expected_value`, or the key is missing and that is empty; returns
  /// the value now stored.
  std::string compare_set(std::string_view key, std::string_view expected_value,
                          std::string_view desired_value);
  /// Blocks until all keys are there; the timeout's error names those that are missing.
  void wait(const Keys& keys, std::optional<Duration> timeout = {});
  /// TCPStore counts the key that coordinates its workers too.
  std::int64_t num_keys();
  /// Whether there was such a key. FileStore throws.
  bool delete_key(std::string_view key);
  /// Of this object's later calls, and of no other user's; a PrefixStore sets that of the store it
  /// stands on.
  void set_timeout(Duration timeout);
  Duration timeout() const;

  /// Whether all keys are there. Never blocks for them.
  bool check(const Keys& keys);
  void append(std::string_view key, std::string_view value);
  /// Blocks until all keys are there.
  std::vector<std::string> multi_get(const Keys& keys);
  /// As many values as keys; all at once.
  void multi_set(const Keys& keys, const std::vector<std::string>& values);
  /// Queues are apart from the keys.
  void queue_push(std::string_view key, std::string_view value);
  /// First in, first out among all users; with `block` waits for a value, else QueueEmptyError when
  /// the queue is empty.
  std::string queue_pop(std::string_view key, bool block = true);
  std::int64_t queue_len(std::string_view key);
  std::vector<std::string> list_keys();
  /// Another user of the same data, with a connection of its own where there are connections.
  std::shared_ptr<Store> clone();
  /// Returns when `members` users have called it with this key.
  void barrier(std::string_view key, int members, std::optional<Duration> timeout = {});
  /// Every member gives a value under its index, from 0, and gets all of them in order; at the
  /// timeout `ranks()` of the error are the missing.
  std::vector<std::string> all_gather(std::string_view key, int index, int members,
                                      std::string_view value, std::optional<Duration> timeout = {});

  /// What does the work. Never null.
  const std::shared_ptr<store::Store>& engine() const { return engine_; }

  /// Wraps any store of the torch-free half.
  explicit Store(std::shared_ptr<store::Store> engine);

 private:
  std::shared_ptr<store::Store> engine_;
};

struct TCPStoreOptions {
  std::optional<int> world_size =
      {};  ///< users, the server's own included; absent or negative: any number
  bool is_master = false;
  Duration timeout = store::kDefaultTimeout;
  bool wait_for_workers = true;
  bool multi_tenant = false;
  /// Master only (elsewhere an error): serve on this bound TCP socket; `port` is then its port or
  /// 0. The constructor owns it from the start: it is closed with the server, at once where the
  /// constructor throws, and where `multi_tenant` finds a server that is there already.
  std::optional<int> master_listen_fd = {};
};

class TCPStore : public Store {
 public:
  /// On the master, port 0 picks a free one. Blocks until the server is there, on the master with a
  /// world size until all users have come; one timeout for all of it.
  TCPStore(std::string host_name, std::uint16_t port, const TCPStoreOptions& options = {});
  const std::string& host() const;
  std::uint16_t port() const;
};

class FileStore : public Store {
 public:
  explicit FileStore(std::string file_name, int world_size = -1);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class HashStore : public Store {
 public:
  HashStore();
};

class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);
  const std::shared_ptr<Store>& underlying_store() const { return store_; }

 private:
  std::shared_ptr<Store> store_;
};

}  // namespace muster
