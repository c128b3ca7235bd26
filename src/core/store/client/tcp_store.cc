// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "core/base/environment.h"
#include "core/base/process/fork_guard.h"
#include "core/net/socket_address.h"
#include "core/store/client/tcp_connection.h"
#include "core/store/factory.h"
#include "core/store/job_keys.h"
#include "core/store/request.h"
#include "core/store/server/tcp_server.h"
#include "core/tunables/tunables.h"

namespace muster::store {
namespace {

constexpr std::string_view kWorkersKey = "muster/workers";
constexpr Duration kLastPostLimit = std::chrono::milliseconds(100);  // limit: patience at the end
constexpr Duration kCountLimit = std::chrono::seconds(1);  // limit: a page of numbers waits for it

/// How long a client waits beyond the server's deadline for the server's timeout error, which names
/// what is missing. Allows for an overloaded machine.
Duration grace(Duration timeout) {
  return std::clamp<Duration>(timeout / 10, std::chrono::seconds(1), std::chrono::seconds(10));
}

class OwnConnection final : public ServerConnection {
 public:
  explicit OwnConnection(std::unique_ptr<TcpConnection> connection)
      : connection_(std::move(connection)) {}

  Reply exchange(const Request& request, TimePoint deadline) override {
    if (Status valid = validate(request); !valid) return {std::move(valid), 0, {}};
    if (!broken_) return {broken_, 0, {}};
    Reply reply = connection_->exchange(request, deadline);
    if (!connection_->broken()) return reply;
    broken_ =
        cut_ ? Status(Code::aborted, "this end closed the connection to the store") : reply.status;
    return {broken_, 0, {}};
  }
  Status post(const Request& request, TimePoint deadline) override {
    if (Status valid = validate(request); !valid) return valid;
    return connection_->post(request, deadline);
  }
  void cut() override {
    cut_ = true;
    connection_->shut_down();
  }

 private:
  const std::unique_ptr<TcpConnection> connection_;
  std::atomic<bool> cut_ = false;
  Status broken_;
};

/// One connection per concurrent caller, so that a blocking `get` delays no other caller. Idle
/// connections are kept for later calls.
class TcpStoreClient final : public RequestStore<TcpStore> {
 public:
  TcpStoreClient(TcpEndpoint endpoint, std::shared_ptr<TcpServer> server, Duration timeout,
                 int host_rank)
      : RequestStore(timeout),
        endpoint_(std::move(endpoint)),
        server_(std::move(server)),
        host_rank_(host_rank) {}

  ~TcpStoreClient() override {
    if (membership_ && !membership_->forked() && !is_join_key(member_of_) && !abandoned_)
      post_last({.op = StoreOp::leave, .index = member_rank_, .keys = {member_of_}});
    membership_.reset();
    idle_.clear();
    if (lingers_ && server_.use_count() == 1) TcpServer::linger(std::move(server_));
  }

  Status begin(TimePoint deadline, bool was_there = false) {
    auto connection = TcpConnection::open(endpoint_, deadline, was_there);
    if (!connection) return connection.status();
    give_back(std::move(*connection));
    return {};
  }

  const std::string& host() const override { return endpoint_.host; }
  std::uint16_t port() const override { return endpoint_.port; }
  const char* kind() const override { return "tcp"; }

  Result<std::vector<std::string>> list_keys() override {
    auto keys = RequestStore::list_keys();
    if (keys) std::erase(*keys, kWorkersKey);
    return keys;
  }

  Status register_member(const std::string& job, int rank, int world_size) override {
    {
      const std::lock_guard lock(mutex_);
      if (membership_ && is_join_key(member_of_) &&
          rank == member_rank_) {  // the server names the reason
        member_of_ = job;
        return {};
      }
      if (!member_of_.empty())
        return Status(Code::invalid_argument,
                      "this store is registered with the job " + member_of_ + " already");
      member_of_ = job;
    }
    const TimePoint deadline = deadline_after(steady_clock(), timeout());
    auto connection = take(deadline);
    Status sent = connection.status();
    if (sent) {
      sent = (*connection)
                 ->post({.op = StoreOp::register_member,
                         .index = rank,
                         .members = world_size,
                         .keys = {job}},
                        deadline);
    }
    const std::lock_guard lock(mutex_);
    if (!sent) {
      member_of_.clear();
      return lost(sent);
    }
    membership_ = std::move(*connection);
    member_rank_ = rank;
    return {};
  }

  void abandon(const Status& why) override {
    const std::string reason = encode_reason(why);
    std::string job;
    int rank = -1;
    {
      const std::lock_guard lock(mutex_);
      if (abandoned_ || !membership_ || membership_->forked()) return;
      abandoned_ = true;
      // The failure of a rank is told to those who wait, and ends the attempt: nobody comes late to
      // it, and the next one may want the port in another process.
      lingers_ = why.code() != Code::peer_failed && why.code() != Code::aborted;
      job = member_of_;
      rank = member_rank_;
    }
    post_last({.op = StoreOp::abandon, .index = rank, .keys = {job}, .values = {reason}});
  }

  Result<std::int64_t> count_joins() override {
    Reply reply = call({.op = StoreOp::count_joins});
    if (!reply.status.ok()) return reply.status;
    return reply.number;
  }

  Result<std::int64_t> count_refusals() override {
    Reply reply = call({.op = StoreOp::count_refusals});
    if (!reply.status.ok()) return reply.status;
    return reply.number;
  }

  Result<std::unique_ptr<ServerConnection>> connect(TimePoint deadline) override {
    auto connection = open(deadline);
    if (!connection) return lost(connection.status());
    return std::unique_ptr<ServerConnection>(new OwnConnection(std::move(*connection)));
  }

  Result<std::shared_ptr<Store>> clone() override {
    auto copy = std::make_shared<TcpStoreClient>(endpoint_, server_, timeout(), host_rank_);
    if (Status connected = copy->begin(deadline_after(steady_clock(), timeout()), true); !connected)
      return lost(connected);
    return std::shared_ptr<Store>(std::move(copy));
  }

 protected:
  Reply call(const Request& request) override {
    const bool may_block = request.op == StoreOp::get || request.op == StoreOp::wait ||
                           request.op == StoreOp::multi_get || request.op == StoreOp::queue_pop ||
                           request.op == StoreOp::barrier || request.op == StoreOp::all_gather;
    const bool may_be_old = request.op == StoreOp::count_refusals;  // shown again where it fails
    const Duration limit =
        may_block ? request.timeout : std::min(timeout(), may_be_old ? kCountLimit : timeout());
    const TimePoint begin = steady_clock().now();
    TimePoint deadline = deadline_after(steady_clock(), limit);
    if (deadline < TimePoint::max() - grace(limit)) deadline += grace(limit);
    auto connection = take(deadline);
    if (!connection) return {lost(connection.status()).with_context(what(request)), 0, {}};
    Reply reply = (*connection)->exchange(request, deadline);
    if (!(*connection)->broken()) {
      give_back(std::move(*connection));
    } else if (reply.status.code() == Code::timed_out) {
      reply.status = Status(Code::timed_out, what(request) + ": " + reply.status.message() + " (" +
                                                 describe(steady_clock().now() - begin) +
                                                 "); its host may hang or be cut off");
    } else {
      reply.status = lost(reply.status).with_context(what(request));
    }
    return reply;
  }

 private:
  static std::string what(const Request& request) {
    return std::string(name_of(request.op)) +
           (request.keys.empty() ? "" : "(" + quoted(request.keys) + ")");
  }

  /// Posts the last request on `membership_`, which must exist: it does until this object's end,
  /// and the caller is the only one that posts (`abandoned_`, or the destructor).
  void post_last(const Request& request) {
    const Status ignored = membership_->post(request, steady_clock().now() + kLastPostLimit);
    static_cast<void>(ignored);  // the server may have ended
  }

  Status lost(const Status& status) const {
    if (host_rank_ < 0 || status.code() != Code::network) return status;
    return Status(Code::network,
                  status.message() + " (it is rank " + std::to_string(host_rank_) + ")",
                  {host_rank_});
  }

  Result<std::unique_ptr<TcpConnection>> take(TimePoint deadline) {
    {
      const std::lock_guard lock(mutex_);
      while (!idle_.empty()) {
        auto connection = std::move(idle_.back());
        idle_.pop_back();
        if (!connection->forked()) return connection;
      }
    }
    return open(deadline);
  }

  Result<std::unique_ptr<TcpConnection>> open(TimePoint deadline) {
    return TcpConnection::open(endpoint_, deadline, true, kUnreachableFor, ask_resolver, &outage_);
  }

  void give_back(std::unique_ptr<TcpConnection> connection) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < static_cast<std::size_t>(tunables().kept_connections))
      idle_.push_back(std::move(connection));
  }

  const TcpEndpoint endpoint_;
  OutageLog outage_;
  std::shared_ptr<TcpServer> server_;  // lives as long as any of its users in this process
  std::mutex mutex_;  // guards all below; never held while a connection sends or receives
  std::vector<std::unique_ptr<TcpConnection>> idle_;
  const int host_rank_;
  std::unique_ptr<TcpConnection> membership_;  // of this rank in `member_of_`; its end tells the
                                               // server that the rank has ended
  std::string member_of_;  // set before `membership_`, while the registration is sent
  int member_rank_ = -1;
  bool abandoned_ = false, lingers_ = false;
};

/// The servers that this process shares (`multi_tenant`), by host and port.
Result<std::shared_ptr<TcpServer>> shared_server(TcpServerOptions options) {
  struct SharedServers {
    std::mutex mutex;
    std::map<std::pair<std::string, std::uint16_t>, std::weak_ptr<TcpServer>> servers;
  };
  static constinit PerProcess<SharedServers> of_process;
  SharedServers& shared = of_process.get();
  const std::lock_guard lock(shared.mutex);
  const std::string host = options.host;
  std::uint16_t port = options.port;
  if (const auto bound = SocketAddress::local_of(options.listener.get()); port == 0 && bound)
    port = bound->port();
  if (port != 0) {
    const auto known = shared.servers[{host, port}].lock();
    if (known && !known->lingers()) return known;  // a lingering one's job is over
  }
  auto server = TcpServer::start(std::move(options));
  if (server) shared.servers[{host, (*server)->port()}] = *server;
  return server;
}

/// The queue to which the client that completes a world of this size pushes an entry.
std::string complete_key(std::int64_t world_size) {
  return "muster/complete/" + std::to_string(world_size);
}

Status arrive(TcpStoreClient& store) {
  const auto count = store.add(kWorkersKey, 1);
  return count ? store.queue_push(complete_key(*count), "") : count.status();
}

/// The server's own client waits until `world_size` clients have connected. Several may wait on one
/// server, so each one pushes the entry again after it has popped it.
Status wait_for_workers(TcpStoreClient& store, int world_size, TimePoint deadline) {
  const TimePoint begin = steady_clock().now();
  Status popped =
      store.queue_pop(complete_key(world_size), true, time_left(steady_clock(), deadline)).status();
  if (popped) return store.queue_push(complete_key(world_size), "");
  if (popped.code() != Code::timed_out) return popped;
  const auto came = store.get(kWorkersKey, Duration::zero());
  return Status(Code::timed_out, (came ? *came : "not all") + " of " + std::to_string(world_size) +
                                     " users came to the store at " + store.host() + ":" +
                                     std::to_string(store.port()) + " within " +
                                     describe(steady_clock().now() - begin));
}

}  // namespace

std::string name_of_run() {
  const std::string name = env_text("TORCHELASTIC_RUN_ID").value_or("none");
  return name == "none" ? std::string() : name;  // `muster run` and torchrun without a name
}

Result<std::shared_ptr<TcpStore>> make_tcp_store(TcpStoreOptions options) {
  Descriptor listener(options.listen_descriptor);  // owned from here on, also if this fails
  if (listener && !options.is_server) {
    return Status(
        Code::invalid_argument,
        "a listen descriptor (" + std::to_string(listener.get()) +
            ") was given to a store that does not serve; give it to the master only (is_master)");
  }
  const TimePoint deadline = deadline_after(steady_clock(), options.timeout);
  if (!options.secret) {
    const bool observes = options.role == Handshake::Role::observer;
    auto secret = Secret::from_environment(observes ? Secret::Use::observe : Secret::Use::join);
    if (!secret) return secret.status();
    options.secret = std::move(*secret);
  }
  const std::string name = options.job ? *options.job : name_of_run();
  TcpEndpoint endpoint{options.host, options.port,        *options.secret, name,
                       options.role, options.within_host, options.epoch,   options.epoch_record};
  std::shared_ptr<TcpServer> server;
  if (options.is_server) {
    TcpServerOptions wanted{
        options.host, options.also_at, options.port, std::move(listener), *options.secret,
        name,         deadline};
    auto started = options.multi_tenant ? shared_server(std::move(wanted))
                                        : TcpServer::start(std::move(wanted));
    if (!started) return started.status();
    server = std::move(*started);
    endpoint.port = server->port();
    if (endpoint.host.empty()) endpoint.host = "localhost";
  }
  auto store = std::make_shared<TcpStoreClient>(std::move(endpoint), std::move(server),
                                                options.timeout, options.host_rank);
  if (Status connected = store->begin(deadline); !connected) return connected;
  const int world_size = options.world_size.value_or(-1);
  if (world_size > 0) {
    if (Status arrived = arrive(*store); !arrived) return arrived;
    if (options.is_server && options.wait_for_workers) {
      if (Status all = wait_for_workers(*store, world_size, deadline); !all) return all;
    }
  }
  return std::shared_ptr<TcpStore>(std::move(store));
}

}  // namespace muster::store
