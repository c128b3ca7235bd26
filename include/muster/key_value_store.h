// SPDX-License-Identifier: BSD-3-Clause
/// Key-value stores through which ranks find each other, and the rendezvous built on them.
///
/// `store/` holds `Store` and its kinds (hash, file, tcp, etcd, prefix) behind `factory.h`, the
/// store's wire protocol as a byte-in, byte-out state machine, and `rendezvous.h` (env://, tcp://,
/// file://). It may include base/ only. Its tests: `ctest -R store`. Behaviour follows
/// torch.distributed's stores; docs/user/stores.md covers cases in which torch's documents are
/// inconsistent.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store {

inline constexpr Duration kDefaultTimeout = std::chrono::seconds(300);
inline constexpr std::size_t kMaxKeyBytes = std::size_t{16} << 10;   // limit: protocol
inline constexpr std::size_t kMaxValueBytes = std::size_t{1} << 30;  // limit: protocol

/// All calls are thread-safe. Blocking calls take an optional timeout (absent: `timeout()`;
/// negative: no limit) and fail with Code::timed_out, naming the keys and the time waited. Other
/// failures are Code::store, Code::refused or Code::network. Values are arbitrary bytes, up to
/// kMaxValueBytes.
class Store {
 public:
  using Timeout = std::optional<Duration>;
  virtual ~Store() = default;

  virtual Status set(std::string_view key, std::string_view value) = 0;
  /// Blocks until the key exists.
  virtual Result<std::string> get(std::string_view key, Timeout timeout = {}) = 0;
  /// Adds to the decimal number stored (0 if missing) and returns the sum, which `get` returns as
  /// text. Code::store if the value is not a number.
  virtual Result<std::int64_t> add(std::string_view key, std::int64_t amount) = 0;
  /// Writes `desired` if the value equals `expected`, or if the key is missing and `expected` is
  /// empty. Returns the value stored afterwards; if the key is missing and `expected` is not empty,
  /// writes nothing and returns `expected`.
  virtual Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                          std::string_view desired) = 0;
  virtual Status wait(std::span<const std::string> keys, Timeout timeout = {}) = 0;
  virtual Result<std::int64_t> num_keys() = 0;
  virtual Result<bool> delete_key(std::string_view key) = 0;

  virtual Result<bool> check(std::span<const std::string> keys) = 0;
  virtual Status append(std::string_view key, std::string_view value) = 0;
  virtual Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                                     Timeout timeout = {}) = 0;
  virtual Status multi_set(std::span<const std::string> keys,
                           std::span<const std::string> values) = 0;
  virtual Status queue_push(std::string_view key, std::string_view value) = 0;
  /// First in, first out across all clients. With `block`, waits for a value; without, Code::store
  /// if the queue is empty.
  virtual Result<std::string> queue_pop(std::string_view key, bool block = true,
                                        Timeout timeout = {}) = 0;
  virtual Result<std::int64_t> queue_len(std::string_view key) = 0;
  virtual Result<std::vector<std::string>> list_keys() = 0;
  /// Returns once `members` clients have called it with this key, which may then be used again. A
  /// timeout error gives the number that arrived.
  virtual Status barrier(std::string_view key, int members, Timeout timeout = {}) = 0;
  /// Each member contributes its value under its index and receives all of them in order. One
  /// request and one reply per member. On a timeout, `ranks()` of the error lists the missing
  /// indices.
  virtual Result<std::vector<std::string>> all_gather(std::string_view key, int index, int members,
                                                      std::string_view value,
                                                      Timeout timeout = {}) = 0;

  /// Another client of the same data, with its own connection if the store uses connections.
  virtual Result<std::shared_ptr<Store>> clone() = 0;
  virtual Duration timeout() const = 0;
  virtual void set_timeout(Duration timeout) = 0;
  /// "tcp", "file", "hash", "etcd", "prefix".
  virtual const char* kind() const = 0;
};

/// For `world_size` clients; the last one destroyed removes the file. Negative: the file stays.
Result<std::shared_ptr<Store>> make_file_store(std::string path, int world_size = -1,
                                               Duration timeout = kDefaultTimeout);
std::shared_ptr<Store> make_hash_store(Duration timeout = kDefaultTimeout);
/// Prepends `prefix/` to every key. May be nested.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);

}  // namespace muster::store
