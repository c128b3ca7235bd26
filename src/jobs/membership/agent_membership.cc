// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <mutex>
#include <thread>

#include "core/base/process/interruption.h"
#include "core/base/threads/thread_start.h"
#include "core/rendezvous/rendezvous.h"
#include "core/store/request.h"
#include "core/store/server/lease_table.h"
#include "jobs/membership/factory.h"
#include "jobs/membership/renewal.h"
#include "jobs/membership/update_queue.h"

namespace muster::membership {
namespace {

using store::Request;
using store::ServerConnection;
using store::StoreOp;

constexpr Duration kGoodbyeLimit = std::chrono::seconds(1);  // limit: for releasing a name
constexpr Duration kPatience = std::chrono::seconds(30);     // limit: with a server that is silent

Duration at_most(Duration time, Duration limit) {
  return time < Duration::zero() ? limit : std::min(time, limit);
}

/// The requests of one membership: one at a time, over a connection that is made anew when it
/// broke.
class AgentServer {
 public:
  explicit AgentServer(std::shared_ptr<store::TcpStore> store) : store_(std::move(store)) {}

  Result<std::unique_ptr<ServerConnection>> connect(TimePoint deadline) {
    return store_->connect(deadline);
  }

  store::Reply ask(const Request& request, TimePoint deadline) {
    const std::unique_lock turn(turn_, deadline);
    if (!turn.owns_lock())
      return {Status(Code::timed_out, "an earlier request to the job's store has no answer yet"),
              0,
              {}};
    if (!connection_) {
      auto made = connect(deadline);
      if (!made) return {made.status(), 0, {}};
      connection_ = std::move(*made);
    }
    store::Reply reply = connection_->exchange(request, deadline);
    if (reply.status.code() == Code::network || reply.status.code() == Code::timed_out ||
        reply.status.code() == Code::aborted)
      connection_.reset();
    return reply;
  }

 private:
  const std::shared_ptr<store::TcpStore> store_;
  RequestTurn turn_;  // held during a request, whose deadline bounds the wait for it
  std::unique_ptr<ServerConnection> connection_;
};

/// A name's lease, which is renewed. The server ends it when `staying` ends.
class AgentHold final : public Hold {
 public:
  AgentHold(std::shared_ptr<AgentServer> server, std::string name, std::int64_t lease, Duration ttl,
            TimePoint granted, Duration timeout, std::unique_ptr<ServerConnection> staying)
      : server_(std::move(server)),
        name_(std::move(name)),
        lease_(lease),
        ttl_(ttl),
        timeout_(timeout),
        staying_(std::move(staying)),
        renewal_("the job's store", name_, ttl, granted) {}
  Status begin() {
    return renewal_.begin([this](TimePoint deadline) {
      const Status kept = server_->ask(request(StoreOp::renew), deadline).status;
      return kept.code() == Code::refused ? Status(Code::closed, kept.message()) : kept;
    });
  }
  ~AgentHold() override {
    renewal_.stop();
    // Without an answer the lease ends all the same, with `staying`.
    if (!renewal_.lost())
      (void)server_->ask(request(StoreOp::release), after(at_most(timeout_, kGoodbyeLimit)));
    staying_->cut();
  }

  Status set(std::string_view value) override {
    if (Status known = state(); known.code() == Code::refused) return known;
    Request setting = request(StoreOp::hold);
    setting.values = {value};
    Status said = server_->ask(setting, after(at_most(timeout_, ttl_))).status;
    if (said.code() != Code::refused) return said;
    renewal_.lose(said.message());
    return state();
  }
  Status state() const override { return renewal_.state(); }
  TimePoint expires() const override { return renewal_.expires(); }
  TimePoint silent_until() const override { return renewal_.silent_until(); }

 private:
  static TimePoint after(Duration time) { return deadline_after(steady_clock(), time); }
  Request request(StoreOp op) const {
    return {.op = op, .timeout = ttl_, .number = lease_, .keys = {name_}};
  }

  const std::shared_ptr<AgentServer> server_;
  const std::string name_;
  const std::int64_t lease_;
  const Duration ttl_, timeout_;
  const std::unique_ptr<ServerConnection> staying_;
  Renewal renewal_;
};

/// A thread that follows the server, and the updates that `next` has not taken yet.
class AgentWatch final : public Watch {
 public:
  AgentWatch(std::shared_ptr<AgentServer> server, std::unique_ptr<ServerConnection> connection,
             std::string job, std::string prefix, std::string record, Duration timeout,
             Duration watch_limit)
      : server_(std::move(server)),
        connection_(std::move(connection)),
        job_(std::move(job)),
        prefix_(std::move(prefix)),
        record_(std::move(record)),
        timeout_(timeout < Duration::zero() ? kPatience : std::min(timeout, kPatience)),
        watch_limit_(watch_limit) {}
  ~AgentWatch() override {
    AgentWatch::close();
    if (thread_.joinable()) thread_.join();
  }
  Status begin() {
    auto thread = start_thread("the thread that follows the job's store", [this] { follow(); });
    if (!thread) return thread.status();
    thread_ = std::move(*thread);
    return {};
  }

  Result<Update> next(Duration timeout) override { return updates_.next(timeout); }
  void close() override {
    updates_.close();
    closing_->raise("the watch was closed");
    const std::lock_guard lock(mutex_);
    connection_->cut();
  }

 private:
  void follow() {
    const Interruption::InterruptionBinding binding(closing_);
    while (!updates_.closed()) {
      store::Reply reply = ask();
      // Its host or this process may have stood still, so silence alone is no end of the server.
      const TimePoint silent_since = steady_clock().now();
      while (reply.status.code() == Code::timed_out && !updates_.closed()) {
        const Status again = connect_again();
        if (again) {
          reply = ask();
        } else if (again.code() != Code::timed_out) {
          return updates_.fail(again);
        }
        const Duration silent = steady_clock().now() - silent_since;
        if (reply.status.code() == Code::timed_out && silent >= watch_limit_)
          return updates_.fail(Status(
              Code::network,
              "it has not answered for " + describe(watch_limit_) + ": " + reply.status.message()));
      }
      auto update = understand(reply);
      if (!update) return updates_.fail(update.status());
      if (update->snapshot || !update->changes.empty() || update->epoch)
        updates_.push(std::move(*update));
    }
  }

  /// A server that lives answers after `timeout_`, if only that there is nothing new.
  store::Reply ask() {
    return connection_->exchange(
        {.op = StoreOp::watch, .timeout = timeout_, .number = known_, .keys = {prefix_, record_}},
        deadline_after(steady_clock(), 2 * timeout_));
  }

  Status connect_again() {
    auto made = server_->connect(deadline_after(steady_clock(), timeout_));
    if (!made) return made.status();
    const std::lock_guard lock(mutex_);
    connection_ = std::move(*made);
    if (updates_.closed()) connection_->cut();
    return {};
  }

  Result<Update> understand(const store::Reply& reply) {
    using Kind = store::LeaseNews::Item::Kind;
    if (!reply.status) return reply.status;
    if (reply.values.size() != 1)
      return Status(Code::network, "the store's server sent malformed news of the job's members");
    auto news = store::decode_lease_news(*reply.values[0]);
    if (!news) return news.status();
    Update update;
    update.revision = known_ = reply.number;
    update.snapshot = news->snapshot;
    for (auto& item : news->items) {
      if (item.kind == Kind::record) {
        auto epoch = decode_epoch(item.value);
        if (!epoch) return epoch.status();
        update.epoch = std::move(*epoch);
        update.epoch_revision = item.revision;
        continue;
      }
      if (!item.name.starts_with(job_))
        return Status(Code::network, "the store's server sent news of another job's members");
      Change change{item.name.substr(job_.size()), {}, item.revision};
      if (item.kind == Kind::held) change.value = std::move(item.value);
      change.silent = item.kind == Kind::silent;
      update.changes.push_back(std::move(change));
    }
    return update;
  }

  const std::shared_ptr<AgentServer> server_;
  std::mutex mutex_;  // guards the pointer, which the thread alone changes
  std::unique_ptr<ServerConnection> connection_;
  const std::string job_, prefix_, record_;
  const Duration timeout_, watch_limit_;
  const std::shared_ptr<Interruption> closing_ = std::make_shared<Interruption>();
  std::int64_t known_ = 0;  // by the thread
  UpdateQueue updates_;
  std::thread thread_;
};

class AgentMembership final : public Membership {
 public:
  AgentMembership(std::shared_ptr<store::TcpStore> store, const std::string& run_id,
                  Duration timeout, Duration watch_limit)
      : server_(std::make_shared<AgentServer>(std::move(store))),
        job_(store::launcher_prefix(run_id) + "member/"),
        record_(store::epoch_record(run_id)),
        timeout_(timeout),
        watch_limit_(watch_limit) {}

  Result<std::unique_ptr<Hold>> hold(std::string_view name, std::string_view value,
                                     Duration ttl) override {
    auto held = take(job_ + std::string(name), value, ttl);
    if (held) return held;
    return held.status().with_context("taking the place \"" + std::string(name) + "\" in the job");
  }

  Result<std::unique_ptr<Watch>> watch(std::string_view prefix) override {
    auto connection = server_->connect(deadline_after(steady_clock(), timeout_));
    if (!connection) return connection.status().with_context("watching the job's members");
    auto watch =
        std::make_unique<AgentWatch>(server_, std::move(*connection), job_,
                                     job_ + std::string(prefix), record_, timeout_, watch_limit_);
    if (Status begun = watch->begin(); !begun) return begun;
    return std::unique_ptr<Watch>(std::move(watch));
  }

  Result<std::int64_t> commit(const Epoch& epoch, std::int64_t expected_revision) override {
    const std::string number = std::to_string(epoch.number), record = encode(epoch);
    const store::Reply reply = server_->ask({.op = StoreOp::commit,
                                             .number = expected_revision,
                                             .keys = {record_},
                                             .values = {number, record}},
                                            deadline_after(steady_clock(), timeout_));
    if (!reply.status) return reply.status;
    return reply.number;
  }

  const char* kind() const override { return "agent"; }

 private:
  Result<std::unique_ptr<Hold>> take(const std::string& name, std::string_view value,
                                     Duration ttl) {
    const TimePoint begin = steady_clock().now(),
                    deadline = deadline_after(steady_clock(), timeout_);
    auto staying = server_->connect(deadline);
    if (!staying) return staying.status();
    const store::Reply reply = (*staying)->exchange(
        {.op = StoreOp::hold, .timeout = ttl, .number = 0, .keys = {name}, .values = {value}},
        deadline);
    if (!reply.status) return reply.status;
    if (Status stays = (*staying)->post(
            {.op = StoreOp::stay, .number = reply.number, .keys = {name}}, deadline);
        !stays)
      return stays;
    auto hold = std::make_unique<AgentHold>(server_, name, reply.number, ttl, begin, timeout_,
                                            std::move(*staying));
    if (Status begun = hold->begin(); !begun) return begun;
    return std::unique_ptr<Hold>(std::move(hold));
  }

  const std::shared_ptr<AgentServer> server_;
  const std::string job_, record_;
  const Duration timeout_, watch_limit_;
};

}  // namespace

Result<std::unique_ptr<Membership>> make_agent_membership(std::shared_ptr<store::TcpStore> store,
                                                          const std::string& run_id,
                                                          Duration timeout, Duration watch_limit) {
  return std::unique_ptr<Membership>(
      new AgentMembership(std::move(store), run_id, timeout, watch_limit));
}

}  // namespace muster::membership
