// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <optional>
#include <thread>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/store/etcd/client.h"
#include "jobs/membership/factory.h"
#include "jobs/membership/renewal.h"
#include "jobs/membership/stored_values.h"
#include "jobs/membership/update_queue.h"

namespace muster::membership {
namespace {

namespace etcd = store::etcd;
using etcd::Compare;
using etcd::KeyRange;
using etcd::Put;
using etcd::Txn;

constexpr std::int64_t kLeastTtlSeconds = 2;                // limit: etcd's floor
constexpr Duration kRevokeLimit = std::chrono::seconds(1);  // limit: for releasing a name
// A stream that says nothing for so long is opened anew, which asks its member whether it lives.
// Each reads all names, so it is not done more often than a lease of the usual time ends.
constexpr Duration kSilence = std::chrono::seconds(5);  // limit: patience with one member
constexpr int kRoundsInTtl = 4;  // limit: a quarter of a lease for asking every member to renew it
constexpr int kLimitsInTtl = 8;  // limit: patience with one member that is asked for a name
constexpr Duration kLookForClose = std::chrono::milliseconds(50);  // limit: of `close` at the end

/// The service, as all parts of one membership share it.
struct EtcdService {
  EtcdService(std::shared_ptr<etcd::EtcdClient> with, std::string below, Secret job_secret,
              Duration limit, Duration of_watches)
      : client(std::move(with)),
        root(std::move(below)),
        proof("etcd", std::move(job_secret)),
        timeout(limit),
        watch_limit(of_watches),
        writer(client, root) {}
  TimePoint deadline() const { return deadline_after(steady_clock(), timeout); }
  std::string names() const { return root + "h/"; }
  std::string epoch() const { return root + "epoch"; }

  std::optional<std::string> open(const etcd::KeyValue& stored) const {
    return proof.open(stored.key, stored.value);
  }

  const std::shared_ptr<etcd::EtcdClient> client;
  const std::string root;
  const ValueProof proof;  // of values: others may write into etcd too
  const Duration timeout, watch_limit;
  etcd::Writer writer;
};

Result<Epoch> epoch_in(const EtcdService& service, const etcd::KeyValue& stored) {
  const auto record = service.open(stored);
  return record ? decode_epoch(*record) : service.proof.missing("the record of the job's epoch");
}

/// A name's lease, which is kept alive.
class EtcdHold final : public Hold {
 public:
  EtcdHold(std::shared_ptr<EtcdService> service, const std::string& name, etcd::EtcdLease lease,
           TimePoint granted, std::int64_t since)
      : service_(std::move(service)),
        key_(service_->names() + name),
        lease_(lease),
        since_(since),
        renewal_("etcd", name, std::chrono::seconds(lease.ttl_s), granted) {}
  Status begin() {
    return renewal_.begin([this](TimePoint deadline) {
      const auto members = static_cast<Duration::rep>(service_->client->members());
      const Duration hedge_after = ttl() / kRoundsInTtl / members;
      Status kept = service_->client->keep_alive(lease_.id, deadline, hedge_after).status();
      if (kept.code() != Code::closed) return kept;
      return is_there(deadline);
    });
  }

  ~EtcdHold() override {
    renewal_.stop();
    if (renewal_.lost()) return;
    const Status ignored =
        service_->client->revoke(lease_.id, deadline_after(steady_clock(), kRevokeLimit));
    static_cast<void>(ignored);  // the lease ends it
  }

  Status set(std::string_view value) override {
    if (Status known = state(); known.code() == Code::refused) return known;
    Txn txn;
    txn.when.push_back(
        {.key = key_, .target = Compare::EtcdTarget::create_revision, .number = since_});
    txn.then.push_back(
        Put{.key = key_, .value = service_->proof.sign(key_, value), .lease = lease_.id});
    const auto written = service_->writer.commit(std::move(txn), service_->deadline());
    if (!written) return written.status();
    if (written->done) return {};
    renewal_.lose("somebody else may hold it by now");
    return state();
  }

  Status state() const override { return renewal_.state(); }
  TimePoint expires() const override { return renewal_.expires(); }
  TimePoint silent_until() const override { return renewal_.silent_until(); }

 private:
  Duration ttl() const { return std::chrono::seconds(lease_.ttl_s); }

  /// A leader that stood still through an election knows nothing of leases that its successor has
  /// kept, and says so. A read that a majority stands behind tells the truth.
  Status is_there(TimePoint deadline) {
    Txn txn;
    txn.then.push_back(KeyRange{.key = key_});
    const auto reply = service_->client->txn(txn, deadline, ttl() / kLimitsInTtl);
    if (!reply) return reply.status();
    const bool there = reply->replies.size() == 1 && !reply->replies[0].values.empty() &&
                       reply->replies[0].values[0].create_revision == since_;
    if (there) return Status(Code::timed_out, "a member of etcd that was away denies the lease");
    return Status(Code::closed, "its time ran out before etcd heard of it again");
  }

  const std::shared_ptr<EtcdService> service_;
  const std::string key_;
  const etcd::EtcdLease lease_;
  const std::int64_t since_;
  Renewal renewal_;
};

/// A thread that follows etcd's stream, and the updates that `next` has not taken yet.
class EtcdWatch final : public Watch {
 public:
  EtcdWatch(std::shared_ptr<EtcdService> service, const std::string& prefix)
      : service_(std::move(service)), names_(service_->names() + prefix) {}
  ~EtcdWatch() override {
    EtcdWatch::close();
    if (thread_.joinable()) thread_.join();
  }
  Status begin() {
    auto thread = start_thread("the thread that follows etcd", [this] { follow(); });
    if (!thread) return thread.status();
    thread_ = std::move(*thread);
    return {};
  }

  Result<Update> next(Duration timeout) override { return updates_.next(timeout); }
  void close() override { updates_.close(); }

 private:
  void follow() {
    Status trouble;
    const Status ended = service_->client->watch({
        .key = service_->root,
        .range_end = etcd::prefix_end(service_->root),
        .deadline = TimePoint::max(),
        .on_open =
            [&] {
              trouble = read_all();
              // Another member is tried as long as the stream's own limit allows.
              return !trouble.ok() && trouble.code() != Code::timed_out;
            },
        .on_events =
            [&](const std::vector<etcd::Event>& events) {
              tell(events);
              return false;
            },
        .on_idle = [&] { return updates_.closed(); },
        .idle = kLookForClose,
        .lost_limit = service_->watch_limit,
        .silence_limit = kSilence,
    });
    // That a member was silent when the stream last began is not why it ended.
    updates_.fail(trouble.ok() || trouble.code() == Code::timed_out ? ended : trouble);
  }

  Status read_all() {
    Txn txn;
    txn.then.push_back(KeyRange{.key = names_, .range_end = etcd::prefix_end(names_)});
    txn.then.push_back(KeyRange{.key = service_->epoch()});
    const auto reply = service_->client->txn(txn, service_->deadline(), kSilence);
    if (!reply) return reply.status();
    if (reply->replies.size() != 2)
      return Status(Code::store, "etcd answered a transaction with too few replies");
    Update update{.revision = reply->revision, .snapshot = true};
    for (const etcd::KeyValue& each : reply->replies[0].values)
      update.changes.push_back(held(each));
    for (const etcd::KeyValue& each : reply->replies[1].values)
      if (Status read = read_epoch(each, update); !read) return read;
    push(std::move(update));
    return {};
  }

  void tell(const std::vector<etcd::Event>& events) {
    Update update;
    for (const etcd::Event& event : events) {
      const etcd::KeyValue& now = event.value;
      if (now.mod_revision <= seen_) continue;  // the snapshot had it
      update.revision = std::max(update.revision, now.mod_revision);
      if (now.key == service_->epoch() && !event.deleted) {
        if (Status read = read_epoch(now, update); !read) updates_.fail(read);
      } else if (now.key.starts_with(names_)) {
        // A lease that ran out deletes the name as its holder would.
        update.changes.push_back(event.deleted ? Change{name_of(now), std::nullopt, 0, true}
                                               : held(now));
      }
    }
    if (!update.changes.empty() || update.epoch) push(std::move(update));
  }

  std::string name_of(const etcd::KeyValue& each) const {
    return each.key.substr(service_->names().size());
  }
  /// A value without a valid proof counts as absent.
  Change held(const etcd::KeyValue& each) const {
    auto value = service_->open(each);
    if (value) return {name_of(each), std::move(value), each.create_revision};
    log(LogLevel::warning,
        service_->proof.missing("what \"" + name_of(each) + "\" says of itself").message());
    return {name_of(each), std::nullopt, 0};
  }

  Status read_epoch(const etcd::KeyValue& stored, Update& update) {
    if (stored.mod_revision <= epoch_seen_) return {};
    auto epoch = epoch_in(*service_, stored);
    if (!epoch) return epoch.status();
    epoch_seen_ = stored.mod_revision;
    update.epoch = std::move(*epoch);
    update.epoch_revision = stored.mod_revision;
    return {};
  }

  void push(Update update) {
    seen_ = std::max(seen_, update.revision);
    updates_.push(std::move(update));
  }

  const std::shared_ptr<EtcdService> service_;
  const std::string names_;
  std::int64_t seen_ = 0;        // by the thread
  std::int64_t epoch_seen_ = 0;  // by the thread
  UpdateQueue updates_;
  std::thread thread_;
};

class EtcdMembership final : public Membership {
 public:
  explicit EtcdMembership(std::shared_ptr<EtcdService> service) : service_(std::move(service)) {}

  Result<std::unique_ptr<Hold>> hold(std::string_view name, std::string_view value,
                                     Duration ttl) override {
    const TimePoint begin = steady_clock().now();
    const auto seconds = std::max<std::int64_t>(
        kLeastTtlSeconds, std::chrono::ceil<std::chrono::seconds>(ttl).count());
    const auto lease = service_->client->grant(seconds, service_->deadline());
    if (!lease) return lease.status();
    const std::string key = service_->names() + std::string(name);
    Txn txn;
    txn.when.push_back({.key = key, .number = 0});
    txn.then.push_back(
        Put{.key = key, .value = service_->proof.sign(key, value), .lease = lease->id});
    txn.otherwise.push_back(KeyRange{.key = key});
    const auto written = service_->writer.commit(std::move(txn), service_->deadline());
    if (written && written->done) {
      auto held =
          std::make_unique<EtcdHold>(service_, std::string(name), *lease, begin, written->revision);
      if (Status begun = held->begin(); !begun) return begun;
      return std::unique_ptr<Hold>(std::move(held));
    }
    static_cast<void>(service_->client->revoke(lease->id, service_->deadline()).ok());
    if (!written) return written.status();
    const auto& holders = written->replies.at(0).values;
    return held_by_another(
        name, holders.empty() ? std::string() : service_->open(holders[0]).value_or(std::string()));
  }

  const char* kind() const override { return "etcd"; }

  Result<std::unique_ptr<Watch>> watch(std::string_view prefix) override {
    auto watch = std::make_unique<EtcdWatch>(service_, std::string(prefix));
    if (Status begun = watch->begin(); !begun) return begun;
    return std::unique_ptr<Watch>(std::move(watch));
  }

  Result<std::int64_t> commit(const Epoch& epoch, std::int64_t expected_revision) override {
    Txn reading;
    reading.then.push_back(KeyRange{.key = service_->epoch()});
    const auto read = service_->client->txn(reading, service_->deadline());
    if (!read) return read.status();
    if (read->replies.size() != 1)
      return Status(Code::store, "etcd answered a transaction with too few replies");
    if (Status fits = judge(epoch, expected_revision, read->replies[0]); !fits) return fits;
    Txn txn;
    txn.when.push_back({.key = service_->epoch(),
                        .target = Compare::EtcdTarget::mod_revision,
                        .number = expected_revision});
    txn.then.push_back(Put{.key = service_->epoch(),
                           .value = service_->proof.sign(service_->epoch(), encode(epoch))});
    txn.otherwise.push_back(KeyRange{.key = service_->epoch()});
    const auto written = service_->writer.commit(std::move(txn), service_->deadline());
    if (!written) return written.status();
    if (written->done) return written->revision;
    if (Status fits = judge(epoch, expected_revision, written->replies[0]); !fits) return fits;
    return Status(Code::internal, "etcd refused an epoch that fits");
  }

 private:
  Status judge(const Epoch& epoch, std::int64_t expected, const etcd::OperationReply& reply) const {
    Epoch present;
    std::int64_t revision = 0;
    if (!reply.values.empty()) {
      auto decoded = epoch_in(*service_, reply.values[0]);
      if (!decoded) return decoded.status();
      present = std::move(*decoded);
      revision = reply.values[0].mod_revision;
    }
    return judge_commit(epoch, expected, present, revision);
  }

  const std::shared_ptr<EtcdService> service_;
};

}  // namespace

Result<std::unique_ptr<Membership>> make_etcd_membership(etcd::ClientOptions options,
                                                         const std::string& prefix,
                                                         const std::string& run_id, Secret secret,
                                                         Duration timeout, Duration watch_limit) {
  auto client = etcd::EtcdClient::make(std::move(options));
  if (!client) return client.status();
  auto service = std::make_shared<EtcdService>(std::move(*client), prefix + "/run/" + run_id + "/",
                                               std::move(secret), timeout, watch_limit);
  Txn nothing;
  nothing.then.push_back(KeyRange{.key = service->epoch(), .count_only = true});
  if (const auto answers = service->client->txn(nothing, service->deadline()); !answers)
    return answers.status().with_context("meeting at etcd");
  return std::unique_ptr<Membership>(std::make_unique<EtcdMembership>(std::move(service)));
}

}  // namespace muster::membership
