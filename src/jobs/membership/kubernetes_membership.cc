// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "core/base/bytes.h"
#include "core/base/log/log.h"
#include "core/base/process/interruption.h"
#include "core/base/threads/thread_start.h"
#include "jobs/membership/factory.h"
#include "jobs/membership/kubernetes_client.h"
#include "jobs/membership/renewal.h"
#include "jobs/membership/stored_values.h"
#include "jobs/membership/update_queue.h"

namespace muster::membership {
namespace {

using std::chrono::seconds;
using MaybeLease = std::optional<KubernetesLease>;

constexpr std::int64_t kLeastLeaseSeconds = 2;  // limit: several requests fit into it
constexpr Duration kRemoveLimit = seconds(1);   // limit: for releasing a name
constexpr Duration kGap = seconds(1);  // limit: without word of the server, that holders may feel
constexpr int kLooksInTtl = 8;         // limit: a live holder renews more seldom than this
constexpr int kSetsInTtl = 2;          // a new value that hangs must leave time for a renewal
constexpr std::size_t kIdentityBytes = 16;

/// The content of the value in a name's Lease.
struct HeldValue {
  std::string name;
  std::int64_t since = 0;  ///< revision of the creation; 0: that of the Lease itself
  std::string value{};
};

/// The API, as all parts of one membership share it.
struct KubernetesService {
  TimePoint deadline() const { return deadline_after(steady_clock(), timeout); }
  std::string object(std::string_view name) const {
    return object_name(job, "h/" + std::string(name));
  }
  std::string epoch() const { return object_name(job, "epoch"); }

  // The holder is under the proof: a value cannot be put under another's hold.
  std::string key(const std::string& object, const std::string& holder) const {
    return object + "/" + holder;
  }
  std::string sign(const KubernetesLease& lease, const HeldValue& held) const {
    const std::string record =
        ByteWriter().put_text(held.name).put(held.since).put_text(held.value).take();
    return proof.sign(key(lease.name, lease.holder), record);
  }
  std::optional<HeldValue> open(const KubernetesLease& lease) const {
    const auto record = proof.open(key(lease.name, lease.holder), lease.value);
    if (!record) return std::nullopt;
    ByteReader reader(*record);
    HeldValue held;
    held.name = reader.get_text();
    held.since = reader.get<std::int64_t>();
    held.value = reader.get_text();
    if (!reader.at_end() || lease.name != object(held.name)) return std::nullopt;
    if (held.since == 0) held.since = lease.revision;
    return held;
  }
  Result<Epoch> epoch_in(const KubernetesLease& lease) const {
    const auto record = proof.open(key(lease.name, lease.holder), lease.value);
    return record ? decode_epoch(*record) : proof.missing("the record of the job's epoch");
  }

  const std::shared_ptr<KubernetesClient> client;
  const std::string job;
  const ValueProof proof;
  const Duration timeout, watch_limit;
};

/// A name's Lease, which is renewed.
class KubernetesHold final : public Hold {
 public:
  KubernetesHold(std::shared_ptr<KubernetesService> service, KubernetesLease lease, HeldValue held,
                 TimePoint granted)
      : service_(std::move(service)),
        lease_(std::move(lease)),
        held_(std::move(held)),
        renewal_("Kubernetes", held_.name, seconds(lease_.ttl_s), granted) {
    held_.since = lease_.revision;
  }
  Status begin() {
    return renewal_.begin([this](TimePoint deadline) {
      const std::unique_lock turn(turn_, deadline);
      if (turn.owns_lock()) return write(deadline);
      return Status(Code::timed_out, "an earlier request has no answer yet");
    });
  }
  ~KubernetesHold() override {
    renewal_.stop();
    if (renewal_.lost()) return;
    lease_.revision = 0;  // whatever it was last
    const Status ignored =
        service_->client->remove(lease_, deadline_after(steady_clock(), kRemoveLimit));
    static_cast<void>(ignored);  // watchers remove it after its time
  }

  Status set(std::string_view value) override {
    if (Status known = state(); known.code() == Code::refused) return known;
    const TimePoint deadline = std::min(
        service_->deadline(), deadline_after(steady_clock(), seconds(lease_.ttl_s) / kSetsInTtl));
    const std::unique_lock turn(turn_, deadline);
    if (!turn.owns_lock())
      return Status(Code::timed_out, "Kubernetes has not answered an earlier request yet");
    std::string before = std::exchange(held_.value, std::string(value));
    Status written = write(deadline);
    if (written.code() == Code::closed) {
      renewal_.lose(written.message());
      return state();
    }
    if (!written) held_.value = std::move(before);
    return written;
  }

  Status state() const override { return renewal_.state(); }
  TimePoint expires() const override { return renewal_.expires(); }
  TimePoint silent_until() const override { return renewal_.silent_until(); }

 private:
  /// Code::closed: it is not this process's Lease any more.
  Status write(TimePoint deadline) {
    while (true) {
      lease_.value = service_->sign(lease_, held_);
      auto written = service_->client->update(lease_, deadline);
      if (!written) return written.status();
      if (!*written) {  // a reply was lost, or it is gone
        written = service_->client->get(lease_.name, deadline);
        if (!written) return written.status();
        if (!*written || (*written)->uid != lease_.uid || (*written)->holder != lease_.holder)
          return Status(Code::closed, "its time ran out before Kubernetes heard of it again");
        lease_.revision = (*written)->revision;
        if (steady_clock().now() >= deadline)
          return Status(Code::timed_out, "somebody else writes into the Lease " + lease_.name);
        continue;
      }
      lease_.revision = (*written)->revision;
      return {};
    }
  }

  const std::shared_ptr<KubernetesService> service_;
  RequestTurn turn_;  // guards the two below; held during a request, within its deadline
  KubernetesLease lease_;
  HeldValue held_;
  Renewal renewal_;
};

/// A thread that follows the job's Leases and removes those whose holders are dead.
class KubernetesWatch final : public Watch {
 public:
  KubernetesWatch(std::shared_ptr<KubernetesService> service, std::string prefix)
      : service_(std::move(service)), prefix_(std::move(prefix)) {}
  ~KubernetesWatch() override {
    KubernetesWatch::close();
    if (thread_.joinable()) thread_.join();
  }
  Status begin() {
    auto thread = start_thread("the thread that follows Kubernetes", [this] { run(); });
    if (!thread) return thread.status();
    thread_ = std::move(*thread);
    return {};
  }
  Result<Update> next(Duration timeout) override { return updates_.next(timeout); }
  void close() override {
    updates_.close();
    closing_->raise("the watch was closed");
  }

 private:
  /// A Lease as it was last seen.
  struct SeenLease {
    KubernetesLease lease;
    std::string name;     ///< that it stands for; empty: it carries no proof
    std::string value{};  ///< as told
    std::int64_t since = 0;
    TimePoint expires_at{};  ///< by this process's clock
  };

  void run() {
    const Interruption::InterruptionBinding binding(closing_);
    updates_.fail(service_->client->follow({
        .on_list = [this](
                       std::int64_t revision,
                       const std::vector<KubernetesLease>& leases) { take_all(revision, leases); },
        .on_event = [this](const LeaseEvent& event) { take(event); },
        .on_idle =
            [this] {
              remove_expired();
              heard_at_ = steady_clock().now();
            },
        .lost_limit = service_->watch_limit,
    }));
  }

  void take_all(std::int64_t revision, const std::vector<KubernetesLease>& leases) {
    const TimePoint now = steady_clock().now();
    if (now - heard_at_ > kGap) heard_since_ = now;
    heard_at_ = now;
    Update update{.revision = revision, .snapshot = true};
    std::map<std::string, SeenLease> before = std::exchange(seen_, {});
    for (const KubernetesLease& lease : leases) {
      if (lease.name == service_->epoch()) {
        read_epoch(lease, update);
        continue;
      }
      const auto known = before.find(lease.name);
      if (known != before.end() && known->second.lease.revision == lease.revision)
        seen_.insert(before.extract(known));  // unrenewed: its time goes on
      else
        see(lease);
      tell(seen_.at(lease.name), update);
    }
    updates_.push(std::move(update));
  }

  void take(const LeaseEvent& event) {
    const KubernetesLease& lease = event.lease;
    Update update{.revision = lease.revision};
    const auto known = seen_.find(lease.name);
    if (lease.name == service_->epoch()) {
      if (!event.deleted) read_epoch(lease, update);
    } else if (event.deleted) {
      if (known == seen_.end()) return;
      if (is_watched(known->second))
        update.changes.push_back({known->second.name, std::nullopt, 0, true});
      seen_.erase(known);
    } else {
      const std::optional<SeenLease> before =
          known == seen_.end() ? std::nullopt : std::optional(known->second);
      const SeenLease& now = see(lease);
      if (before && before->lease.uid == lease.uid && before->name == now.name &&
          before->value == now.value)
        return;  // only renewed
      if (before && is_watched(*before) && now.name.empty())
        update.changes.push_back({before->name, std::nullopt, 0});
      tell(now, update);
    }
    if (!update.changes.empty() || update.epoch) updates_.push(std::move(update));
  }

  SeenLease& see(const KubernetesLease& lease) {
    auto held = service_->open(lease);
    SeenLease& seen = seen_[lease.name];
    if (!held && seen.lease.uid != lease.uid)
      log(LogLevel::warning,
          service_->proof.missing("what the Lease " + lease.name + " says").message());
    seen = SeenLease{lease, held ? held->name : std::string(), held ? held->value : std::string(),
                     held ? held->since : 0, deadline_after(steady_clock(), seconds(lease.ttl_s))};
    seen.lease.value.clear();
    return seen;
  }
  bool is_watched(const SeenLease& seen) const {
    return !seen.name.empty() && seen.name.starts_with(prefix_);
  }
  /// A Lease without a valid proof counts as absent.
  void tell(const SeenLease& seen, Update& update) {
    if (is_watched(seen)) update.changes.push_back({seen.name, seen.value, seen.since});
  }

  void read_epoch(const KubernetesLease& lease, Update& update) {
    if (lease.revision <= epoch_seen_) return;
    auto epoch = service_->epoch_in(lease);
    if (!epoch) return updates_.fail(epoch.status());
    epoch_seen_ = lease.revision;
    update.epoch = std::move(*epoch);
    update.epoch_revision = lease.revision;
  }

  // Holders could not renew while the server was away, nor be seen while this process stood still.
  // Each gets a full ttl, counted from the first list or look after that, or from a look that
  // failed. A deleted Lease is reported by the stream, so only expiry is checked here.
  void remove_expired() {
    const TimePoint now = steady_clock().now();
    if (now - heard_at_ > kGap) heard_since_ = now;
    const TimePoint limit = deadline_after(steady_clock(), kRemoveLimit);
    for (auto& [object, seen] : seen_) {
      const Duration ttl = seconds(seen.lease.ttl_s);
      if (seen.name.empty() || ttl <= Duration(0) ||
          now < std::max(seen.expires_at, heard_since_ + ttl))
        continue;
      const auto there = service_->client->get(object, limit);
      seen.expires_at = there ? limit : now + ttl;
      if (!there) return;
      if (!*there || (*there)->revision != seen.lease.revision) continue;
      const Status ignored = service_->client->remove(seen.lease, limit);
      static_cast<void>(ignored);
    }
  }

  const std::shared_ptr<KubernetesService> service_;
  const std::string prefix_;
  const std::shared_ptr<Interruption> closing_ = std::make_shared<Interruption>();
  std::map<std::string, SeenLease> seen_;  // by the thread; objects
  std::int64_t epoch_seen_ = 0;            // by the thread
  TimePoint heard_at_{}, heard_since_{};  // by the thread: the last time; without a gap before that
  UpdateQueue updates_;
  std::thread thread_;
};

class KubernetesMembership final : public Membership {
 public:
  explicit KubernetesMembership(std::shared_ptr<KubernetesService> service)
      : service_(std::move(service)) {}

  Result<std::unique_ptr<Hold>> hold(std::string_view name, std::string_view value,
                                     Duration ttl) override {
    const TimePoint deadline = service_->deadline();
    HeldValue held{std::string(name), 0, std::string(value)};
    KubernetesLease lease{.name = service_->object(name),
                          .holder = random_name(kIdentityBytes),
                          .ttl_s = std::max<std::int64_t>(kLeastLeaseSeconds,
                                                          std::chrono::ceil<seconds>(ttl).count())};
    lease.value = service_->sign(lease, held);
    while (true) {
      const TimePoint begin = steady_clock().now();
      auto made = service_->client->create(lease, deadline);
      if (!made) return made.status();
      if (!*made) {
        auto there = service_->client->get(lease.name, deadline);
        if (!there) return there.status();
        if (!*there) continue;
        if ((*there)->holder != lease.holder) {
          if (Status free = await_end_of(**there, held.name, deadline); !free) return free;
          continue;
        }
        made = std::move(there);  // the reply to an earlier attempt was lost
      }
      auto hold = std::make_unique<KubernetesHold>(service_, std::move(**made), held, begin);
      if (Status begun = hold->begin(); !begun) return begun;
      return std::unique_ptr<Hold>(std::move(hold));
    }
  }

  Result<std::unique_ptr<Watch>> watch(std::string_view prefix) override {
    auto watch = std::make_unique<KubernetesWatch>(service_, std::string(prefix));
    if (Status begun = watch->begin(); !begun) return begun;
    return std::unique_ptr<Watch>(std::move(watch));
  }

  Result<std::int64_t> commit(const Epoch& epoch, std::int64_t expected_revision) override {
    const TimePoint deadline = service_->deadline();
    KubernetesLease lease{.name = service_->epoch(), .holder = random_name(kIdentityBytes)};
    lease.value = service_->proof.sign(service_->key(lease.name, lease.holder), encode(epoch));
    auto present = service_->client->get(lease.name, deadline);
    if (!present) return present.status();
    if (Status fits = judge(epoch, expected_revision, *present); !fits) return fits;
    if (*present) {
      lease.uid = (*present)->uid;
      lease.revision = (*present)->revision;
    }
    auto written = *present ? service_->client->update(lease, deadline)
                            : service_->client->create(lease, deadline);
    if (!written) return written.status();
    if (*written) return (*written)->revision;
    present = service_->client->get(lease.name, deadline);
    if (!present) return present.status();
    // The reply to an earlier attempt was lost.
    if (*present && (*present)->holder == lease.holder) return (*present)->revision;
    if (Status fits = judge(epoch, expected_revision, *present); !fits) return fits;
    return Status(Code::internal, "Kubernetes refused an epoch that fits");
  }

  const char* kind() const override { return "kubernetes"; }

 private:
  /// Ok: the name may be free. Code::refused: its holder lives.
  Status await_end_of(const KubernetesLease& other, const std::string& name, TimePoint deadline) {
    const Duration ttl = seconds(std::max<std::int64_t>(other.ttl_s, 1));
    const TimePoint expires_at = deadline_after(steady_clock(), ttl);
    const auto held = service_->open(other);
    Status refused = held_by_another(name, held ? held->value : std::string());
    if (!held || expires_at > deadline) return refused;
    while (steady_clock().now() < expires_at) {
      if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
      std::this_thread::sleep_until(store::earliest_look(
          std::min(expires_at, deadline_after(steady_clock(), ttl / kLooksInTtl))));
      const auto now = service_->client->get(other.name, deadline);
      if (!now) return now.status();
      if (!*now || (*now)->uid != other.uid) return {};
      if ((*now)->revision != other.revision) return refused;
    }
    return service_->client->remove(other, deadline);
  }

  Status judge(const Epoch& epoch, std::int64_t expected, const MaybeLease& present) const {
    if (!present) return judge_commit(epoch, expected, {}, 0);
    const auto decoded = service_->epoch_in(*present);
    if (!decoded) return decoded.status();
    return judge_commit(epoch, expected, *decoded, present->revision);
  }

  const std::shared_ptr<KubernetesService> service_;
};

}  // namespace

Result<std::unique_ptr<Membership>> make_kubernetes_membership(const KubernetesOptions& options,
                                                               const std::string& run_id,
                                                               Secret secret, Duration timeout,
                                                               Duration watch_limit) {
  auto client = KubernetesClient::make(options, label_value(run_id));
  if (!client) return client.status();
  auto service = std::make_shared<KubernetesService>(
      KubernetesService{.client = std::move(*client),
                        .job = run_id,
                        .proof = ValueProof("Kubernetes", std::move(secret)),
                        .timeout = timeout,
                        .watch_limit = watch_limit});
  // A wrong token, Role or address fails here, not in a later call.
  if (const auto reached = service->client->get(service->epoch(), service->deadline()); !reached)
    return reached.status();
  return std::unique_ptr<Membership>(new KubernetesMembership(std::move(service)));
}

}  // namespace muster::membership
