/// How stores are made. The classes behind are private to `store/`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "muster/base/secret.h"
#include "muster/store/store.h"

namespace muster::store {

struct TcpStoreOptions {
  std::string host = "localhost";
  std::uint16_t port = 29500;  ///< server: 0 picks a free one
  std::optional<int>
      world_size;  ///< users, the server's own included; absent or negative: any number
  bool is_server = false;
  Duration timeout = kDefaultTimeout;
  bool wait_for_workers = true;  ///< with a world size: return once all users have come
  bool multi_tenant =
      false;  ///< share one server with other users of this process on the same host and port
  /// Server: serve on this bound TCP socket; `port` is then its port or 0. make_tcp_store owns it
  /// from its first line on: it is closed with the server, at once where making the store fails,
  /// and also where `multi_tenant` finds a server that is there already. For a store that does not
  /// serve it is an error. -1: none.
  int listen_descriptor = -1;
  std::optional<Secret> secret;  ///< absent: Secret::from_environment()
  std::string job;               ///< as in Handshake::Hello; empty unless the job has a name
  int host_rank =
      -1;  ///< the rank that hosts the server, named when the connection to it is lost; -1: no rank
  /// A client on the server's host connects through a Unix socket; false: over TCP all the same.
  bool within_host = true;
};

/// What a TCP store says beyond the interface.
class TcpStore : public Store {
 public:
  virtual const std::string& host() const = 0;
  virtual std::uint16_t port() const = 0;
  /// From now on this process is `rank` of the job whose keys all begin with `job` + "/", for as
  /// long as this object lives. When it goes, in good order or not, meetings (barrier, all_gather)
  /// of all `world_size` ranks under such keys that would need it fail at once, naming it.
  virtual Status attend(const std::string& job, int rank, int world_size) = 0;
  /// How many times all ranks of a job have met in this store to join it.
  virtual Result<std::int64_t> count_joins() { return std::int64_t{0}; }
};

/// Clients started before the server wait for it, up to the timeout, within which the whole of this
/// call ends. After five seconds without success one warning tells which address is tried and why
/// it fails.
Result<std::shared_ptr<TcpStore>> make_tcp_store(TcpStoreOptions options);
/// `world_size` users; the last one to be destroyed removes the file. Negative: the file stays.
Result<std::shared_ptr<Store>> make_file_store(std::string path, int world_size = -1,
                                               Duration timeout = kDefaultTimeout);
std::shared_ptr<Store> make_hash_store(Duration timeout = kDefaultTimeout);
/// Every key under `prefix/`; nests.
std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store);
/// What a prefix store stands on; null for other kinds.
std::shared_ptr<Store> underlying_store(const Store& store);

}  // namespace muster::store
