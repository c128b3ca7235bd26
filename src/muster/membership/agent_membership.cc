#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "muster/base/thread_start.h"
#include "muster/membership/factory.h"
#include "muster/store/lease_table.h"
#include "muster/store/rendezvous.h"
#include "muster/store/server_connection.h"

namespace muster::membership {
namespace {

using store::Request;
using store::ServerConnection;
using store::StoreOp;

constexpr int kBeatsInTtl = 5;                               // so many signs of life in its time
constexpr Duration kGoodbyeLimit = std::chrono::seconds(1);  // for releasing a name

Duration at_most(Duration time, Duration limit) {
  return time < Duration::zero() ? limit : std::min(time, limit);
}

/// One name's lease, shared by the hold and the thread that renews it.
struct Lease {
  std::string name;
  std::int64_t number = 0;
  Duration ttl{};
  TimePoint heard{};  ///< when the server answered last; guarded by the keeper's lock
  Status state;       ///< guarded by the keeper's lock
  std::unique_ptr<ServerConnection> staying;
};

/// Renews all leases of one membership, on a thread that starts with the first.
class LeaseKeeper {
 public:
  LeaseKeeper(std::shared_ptr<store::TcpStore> store, Duration timeout)
      : store_(std::move(store)), timeout_(timeout) {}

  ~LeaseKeeper() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  /// One request at a time, over one connection that is made anew when it broke.
  store::Reply ask(const Request& request, Duration limit) {
    const std::lock_guard lock(ask_mutex_);
    const TimePoint deadline = deadline_after(steady_clock(), limit);
    if (!connection_) {
      auto made = store_->connect(deadline);
      if (!made) return {made.status(), 0, {}};
      connection_ = std::move(*made);
    }
    store::Reply reply = connection_->exchange(request, deadline);
    if (reply.status.code() == Code::network || reply.status.code() == Code::timed_out)
      connection_.reset();
    return reply;
  }

  Result<std::shared_ptr<Lease>> take(const std::string& name, std::string_view value,
                                      Duration ttl) {
    auto lease = std::make_shared<Lease>();
    lease->name = name;
    lease->ttl = ttl;
    const TimePoint deadline = deadline_after(steady_clock(), timeout_);
    auto staying = store_->connect(deadline);
    if (!staying) return staying.status();
    lease->staying = std::move(*staying);
    const store::Reply reply = lease->staying->exchange(
        {.op = StoreOp::hold, .timeout = ttl, .number = 0, .keys = {name}, .values = {value}},
        deadline);
    if (!reply.status) return reply.status;
    lease->number = reply.number;
    lease->heard = steady_clock().now();
    if (Status stays = lease->staying->post(
            {.op = StoreOp::stay, .number = lease->number, .keys = {lease->name}}, deadline);
        !stays)
      return stays;
    if (Status kept = keep(lease); !kept) return kept;
    return lease;
  }

  Status set(Lease& lease, std::string_view value) {
    if (Status known = state(lease); !known) return known;
    return note(lease, ask({.op = StoreOp::hold,
                            .timeout = lease.ttl,
                            .number = lease.number,
                            .keys = {lease.name},
                            .values = {value}},
                           at_most(timeout_, lease.ttl))
                           .status);
  }

  Status state(const Lease& lease) const {
    const std::lock_guard lock(mutex_);
    return lease.state;
  }

  void release(const std::shared_ptr<Lease>& lease) {
    {
      const std::lock_guard lock(mutex_);
      std::erase(leases_, lease);
    }
    if (state(*lease)) {
      (void)ask({.op = StoreOp::release, .number = lease->number, .keys = {lease->name}},
                at_most(timeout_, kGoodbyeLimit));
    }
    lease->staying->cut();
  }

 private:
  Status keep(const std::shared_ptr<Lease>& lease) {
    const std::lock_guard lock(mutex_);
    leases_.push_back(lease);
    wake_.notify_all();
    if (thread_.joinable()) return {};
    auto thread =
        start_thread("the thread that renews this node's place in the job", [this] { run(); });
    if (!thread.ok()) {
      leases_.pop_back();
      return thread.status();
    }
    thread_ = std::move(*thread);
    return {};
  }

  /// Keeps what the server said of a lease. One that was silent for its whole time is lost: others
  /// may have the name by now.
  Status note(Lease& lease, const Status& said) {
    const std::lock_guard lock(mutex_);
    const TimePoint now = steady_clock().now();
    if (said) {
      lease.heard = now;
    } else if (said.code() == Code::refused) {
      lease.state = said;
    } else if (now - lease.heard >= lease.ttl && lease.state.ok()) {
      lease.state = Status(Code::refused, "the place \"" + lease.name +
                                              "\" in the job is lost: its server has not answered "
                                              "for " +
                                              describe(lease.ttl) + " (" + said.message() + ")");
    }
    return said;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      Duration beat = std::chrono::hours(1);
      for (const auto& lease : leases_) {
        if (lease->state.ok()) beat = std::min<Duration>(beat, lease->ttl / kBeatsInTtl);
      }
      const std::size_t known = leases_.size();
      wake_.wait_for(lock, beat, [&] { return stop_ || leases_.size() > known; });
      if (stop_) return;
      const auto leases = leases_;
      lock.unlock();
      for (const auto& lease : leases) {
        if (!state(*lease)) continue;
        (void)note(*lease, ask({.op = StoreOp::renew,
                                .timeout = lease->ttl,
                                .number = lease->number,
                                .keys = {lease->name}},
                               lease->ttl)
                               .status);
      }
      lock.lock();
    }
  }

  const std::shared_ptr<store::TcpStore> store_;
  const Duration timeout_;
  std::mutex ask_mutex_;
  std::unique_ptr<ServerConnection> connection_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::vector<std::shared_ptr<Lease>> leases_;
  std::thread thread_;
};

class AgentHold final : public Hold {
 public:
  AgentHold(std::shared_ptr<LeaseKeeper> keeper, std::shared_ptr<Lease> lease)
      : keeper_(std::move(keeper)), lease_(std::move(lease)) {}
  ~AgentHold() override { keeper_->release(lease_); }
  Status set(std::string_view value) override { return keeper_->set(*lease_, value); }
  Status state() const override { return keeper_->state(*lease_); }

 private:
  const std::shared_ptr<LeaseKeeper> keeper_;
  const std::shared_ptr<Lease> lease_;
};

class AgentWatch final : public Watch {
 public:
  AgentWatch(std::shared_ptr<store::TcpStore> store, std::unique_ptr<ServerConnection> connection,
             std::string job, std::string prefix, std::string record, Duration timeout)
      : store_(std::move(store)),
        connection_(std::move(connection)),
        job_(std::move(job)),
        prefix_(std::move(prefix)),
        record_(std::move(record)),
        timeout_(timeout) {}

  Result<Update> next(Duration timeout) override {
    if (closed_) return closed();
    // A server that is alive answers at the timeout; one that hangs shall not be waited for longer.
    const Duration grace = timeout_ < Duration::zero() ? std::chrono::hours(1) : timeout_;
    const TimePoint now = steady_clock().now();
    const TimePoint deadline =
        timeout < Duration::zero() || timeout >= TimePoint::max() - now - grace
            ? TimePoint::max()
            : now + timeout + grace;
    const store::Reply reply = connection_->exchange(
        {.op = StoreOp::watch, .timeout = timeout, .number = known_, .keys = {prefix_, record_}},
        deadline);
    if (closed_) return closed();
    if (!reply.status) return reply.status;
    if (reply.values.size() != 1)
      return Status(Code::network, "the store's server sent malformed news of the job's members");
    auto news = store::decode_lease_news(*reply.values[0]);
    if (!news) return news.status();
    known_ = reply.number;
    return understand(std::move(*news));
  }

  void close() override {
    closed_ = true;
    connection_->cut();
  }

 private:
  static Status closed() { return Status(Code::aborted, "the watch was closed"); }

  Result<Update> understand(store::LeaseNews news) const {
    using Kind = store::LeaseNews::Item::Kind;
    Update update;
    update.revision = known_;
    update.snapshot = news.snapshot;
    for (auto& item : news.items) {
      if (item.kind == Kind::record) {
        auto epoch = decode_epoch(item.value);
        if (!epoch) return epoch.status();
        update.epoch = std::move(*epoch);
        update.epoch_revision = item.revision;
        continue;
      }
      Change change{item.name.substr(job_.size()), {}, item.revision};
      if (item.kind == Kind::held) change.value = std::move(item.value);
      update.changes.push_back(std::move(change));
    }
    return update;
  }

  const std::shared_ptr<store::TcpStore> store_;
  const std::unique_ptr<ServerConnection> connection_;
  const std::string job_, prefix_, record_;
  const Duration timeout_;
  std::atomic<bool> closed_ = false;
  std::int64_t known_ = 0;
};

class AgentMembership final : public Membership {
 public:
  AgentMembership(std::shared_ptr<store::TcpStore> store, const std::string& run_id,
                  Duration timeout)
      : store_(store),
        keeper_(std::make_shared<LeaseKeeper>(std::move(store), timeout)),
        job_(store::launcher_prefix(run_id) + "member/"),
        record_(store::epoch_record(run_id)),
        timeout_(timeout) {}

  Result<std::unique_ptr<Hold>> hold(std::string_view name, std::string_view value,
                                     Duration ttl) override {
    auto lease = keeper_->take(job_ + std::string(name), value, ttl);
    if (!lease)
      return lease.status().with_context("taking the place \"" + std::string(name) +
                                         "\" in the job");
    return std::unique_ptr<Hold>(new AgentHold(keeper_, std::move(*lease)));
  }

  Result<std::unique_ptr<Watch>> watch(std::string_view prefix) override {
    auto connection = store_->connect(deadline_after(steady_clock(), timeout_));
    if (!connection) return connection.status().with_context("watching the job's members");
    return std::unique_ptr<Watch>(new AgentWatch(store_, std::move(*connection), job_,
                                                 job_ + std::string(prefix), record_, timeout_));
  }

  Result<std::int64_t> commit(const Epoch& epoch, std::int64_t expected_revision) override {
    const std::string number = std::to_string(epoch.number), record = encode(epoch);
    const store::Reply reply = keeper_->ask({.op = StoreOp::commit,
                                             .number = expected_revision,
                                             .keys = {record_},
                                             .values = {number, record}},
                                            timeout_);
    if (!reply.status) return reply.status;
    return reply.number;
  }

  const char* kind() const override { return "agent"; }

 private:
  const std::shared_ptr<store::TcpStore> store_;
  const std::shared_ptr<LeaseKeeper> keeper_;
  const std::string job_, record_;
  const Duration timeout_;
};

}  // namespace

Result<std::unique_ptr<Membership>> make_agent_membership(std::shared_ptr<store::TcpStore> store,
                                                          const std::string& run_id,
                                                          Duration timeout) {
  return std::unique_ptr<Membership>(new AgentMembership(std::move(store), run_id, timeout));
}

}  // namespace muster::membership
