/// Key-value stores as users see them: torch's names, errors thrown. Each wraps a `store::Store`, which does the work.
///
/// All calls are thread-safe. Values are bytes. A timeout throws DistStoreError naming the keys and the time waited.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/clock.h"
#include "muster/store/store.h"

namespace muster {

class Store {
 public:
  using Keys = std::vector<std::string>;
  virtual ~Store() = default;

  void set(std::string_view key, std::string_view value);
  /// Blocks until the key is there.
  std::string get(std::string_view key);
  /// Adds to a decimal number (missing: 0) and returns the sum.
  std::int64_t add(std::string_view key, std::int64_t amount);
  /// Writes where the value is `expected_value`, or the key is missing and that is empty; returns the value now stored.
  std::string compare_set(std::string_view key, std::string_view expected_value, std::string_view desired_value);
  void wait(const Keys& keys, std::optional<Duration> timeout = {});
  std::int64_t num_keys();
  /// Whether there was such a key. FileStore throws.
  bool delete_key(std::string_view key);
  void set_timeout(Duration timeout);
  Duration timeout() const;

  bool check(const Keys& keys);
  void append(std::string_view key, std::string_view value);
  std::vector<std::string> multi_get(const Keys& keys);
  void multi_set(const Keys& keys, const std::vector<std::string>& values);
  void queue_push(std::string_view key, std::string_view value);
  std::string queue_pop(std::string_view key, bool block = true);
  std::int64_t queue_len(std::string_view key);
  std::vector<std::string> list_keys();
  std::shared_ptr<Store> clone();
  void barrier(std::string_view key, int members, std::optional<Duration> timeout = {});
  std::vector<std::string> all_gather(std::string_view key, int index, int members, std::string_view value,
                                      std::optional<Duration> timeout = {});

  /// What does the work. Never null.
  const std::shared_ptr<store::Store>& engine() const { return engine_; }

  /// Wraps any store of the torch-free half.
  explicit Store(std::shared_ptr<store::Store> engine);

 private:
  std::shared_ptr<store::Store> engine_;
};

struct TCPStoreOptions {
  std::optional<int> world_size = {};  ///< users, the server's own included; absent or negative: any number
  bool is_master = false;
  Duration timeout = store::kDefaultTimeout;
  bool wait_for_workers = true;
  bool multi_tenant = false;
  std::optional<int> master_listen_fd = {};  ///< a bound socket, taken over
};

class TCPStore : public Store {
 public:
  /// On the master, port 0 picks a free one.
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
