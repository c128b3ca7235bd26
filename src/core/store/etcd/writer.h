/// Writes to etcd that happen exactly once, although `EtcdClient` may send a request twice.
///
/// Each transaction also writes a key that only this writer writes, under the condition that it has
/// the version which the writer remembers. A repeated transaction therefore fails, and the version
/// tells that the first one has succeeded.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/store/etcd/client.h"

namespace muster::store::etcd {

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
  std::mutex mutex_;
  std::vector<WriteMark> idle_;
};

}  // namespace muster::store::etcd
