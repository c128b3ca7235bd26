// SPDX-License-Identifier: BSD-3-Clause
/// Creates stores. Their classes are private to `store/`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/store/request.h"
#include "muster/key_value_store.h"

namespace muster::store {

struct TcpStoreOptions {
  std::string host = "localhost";
  std::uint16_t port = 29500;  ///< server: 0 picks a free port
  /// Server: further numeric addresses to listen at, with the same port. Those that this host
  /// lacks, or where the port is taken, are left out.
  std::vector<std::string> also_at;
  /// Number of clients, including the server's own; absent or negative: any number.
  std::optional<int> world_size;
  bool is_server = false;
  Duration timeout = kDefaultTimeout;
  bool wait_for_workers = true;  ///< with a world size: return once all clients have connected
  /// Share one server among all stores of this process with the same host and port.
  bool multi_tenant = false;
  /// Server only: serve on this bound TCP socket; -1: none. `port` must be its port or 0.
  /// make_tcp_store takes ownership immediately. The socket is closed with the server; at once if
  /// creating the store fails or if `multi_tenant` finds an existing server. An error for a store
  /// that does not serve.
  int listen_descriptor = -1;
  std::optional<Secret> secret = {};  ///< default: Secret::from_environment()
  /// The job's name. Encryption keys are bound to it and to the port, so both sides must give the
  /// same one. Default: name_of_run().
  std::optional<std::string> job;
  /// The rank that hosts the server, named in errors if the connection to it is lost; -1: no rank.
  int host_rank = -1;
  /// Client: store, launcher or observer. Each has keys of its own. An observer may read the traces
  /// of a job's ranks and do nothing else (`observer_rights.h`).
  Handshake::Role role = Handshake::Role::store;
  /// True: a client on the server's host connects through a Unix socket. False: always TCP.
  bool within_host = true;
  /// Client: the epoch of the job that this process belongs to; 0: none. Once a later one has been
  /// committed to `epoch_record`, the server refuses whatever this client asks for (Code::refused).
  std::int64_t epoch = 0;
  std::string epoch_record;
};

/// How many questions of observers may be queued for one rank (`core/trace/responder.h`).
inline constexpr std::int64_t kMostQuestions = 8;  // limit: load of a rank

/// The launcher's name for this process's job (TORCHELASTIC_RUN_ID); empty for "none".
std::string name_of_run();

/// A store on a TCP server.
class TcpStore : public Store {
 public:
  virtual const std::string& host() const = 0;
  virtual std::uint16_t port() const = 0;
  /// Declares this process to be `rank` of the job whose keys begin with `job` + "/", for the
  /// lifetime of this object. When the process disconnects, in an orderly way or not, every barrier
  /// and all_gather of all `world_size` ranks under such keys that needs it fails immediately, with
  /// an error that names it.
  virtual Status register_member(const std::string& job, int rank, int world_size) = 0;
  /// This process gives up joining the job: the others learn why, those who come
  /// later too. If this process hosts the store, the server outlives this object for that, for at
  /// most 30 s.
  virtual void abandon(const Status& /*why*/) {}
  /// Number of times all ranks of a job have met in this store to join it.
  virtual Result<std::int64_t> count_joins() { return std::int64_t{0}; }
  /// How many connections the server has turned away. Fails after some 2 s at the most.
  virtual Result<std::int64_t> count_refusals() { return std::int64_t{0}; }
  /// Another connection to the same server; the store may go before it.
  virtual Result<std::unique_ptr<ServerConnection>> connect(TimePoint deadline) = 0;
};

struct EtcdOptions {
  /// "http://host:2379", "https://host:2379" or "host:2379": some or all members of one cluster.
  std::vector<std::string> endpoints{};
  /// All keys in etcd begin with it. Stores with the same prefix share their keys, so a job that
  /// shall not see an earlier one's takes another.
  std::string prefix = "muster";
  Duration timeout = kDefaultTimeout;
  std::string user{};  ///< empty: the cluster has no authentication
  std::string password{};
  std::string authority_file{};    ///< PEM, the authority of the members' certificates
  std::string certificate_file{};  ///< PEM, this client's, if the cluster requires one
  std::string key_file{};          ///< PEM, the certificate's key
};

/// A client started before the server waits for it; `timeout` limits the whole call. After 5 s
/// without success, a warning logs the address and the reason.
Result<std::shared_ptr<TcpStore>> make_tcp_store(TcpStoreOptions options);
/// A store in an etcd cluster (API v3 through its JSON gateway, server 3.4 or later). Keys outlive
/// the job. Each operation is one atomic step and happens once even if a member fails in the middle
/// of it, except that a multi_set of more than 60 keys takes several steps. Waits for the cluster
/// up to `timeout`. Code::refused: user, password, permission or certificate.
Result<std::shared_ptr<Store>> make_etcd_store(EtcdOptions options);
/// The options that MUSTER_ETCD_USER, _PASSWORD, _CACERT, _CERT and _KEY give, for `endpoints`
/// separated by commas.
EtcdOptions etcd_options_from_environment(const std::string& endpoints);
/// The store below a prefix store; null for other kinds.
std::shared_ptr<Store> underlying_store(const Store& store);

}  // namespace muster::store
