// SPDX-License-Identifier: BSD-3-Clause
/// A client of the API of Kubernetes, for the Leases (coordination.k8s.io/v1) of one job.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/store/http/connection.h"
#include "jobs/membership/factory.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::membership {

struct KubernetesLease {
  std::string name;           ///< of the object
  std::string uid{};          ///< of this object; one of the same name that comes later differs
  std::int64_t revision = 0;  ///< resourceVersion
  std::string holder{};       ///< holderIdentity
  std::int64_t ttl_s = 0;     ///< leaseDurationSeconds; 0: none
  std::string value{};        ///< any bytes
};

/// One event of a watch.
struct LeaseEvent {
  bool deleted = false;
  KubernetesLease lease;
};

/// All calls are thread-safe and block up to their deadline, then fail with Code::timed_out and the
/// last reason; Code::aborted where the thread is interrupted. Code::refused: token, permission or
/// certificate; token and permission at once before the first request of that method that succeeds,
/// later only at the deadline. Code::store: whatever else the server did not like. A call may be
/// carried out twice if its reply is lost.
class KubernetesClient {
 public:
  /// `job`: the value of the label that all its leases carry (`label_value`). Only checks the
  /// options; the first call connects.
  static Result<std::shared_ptr<KubernetesClient>> make(const KubernetesOptions& options,
                                                        std::string job);
  KubernetesClient(const KubernetesOptions& options, std::string job,
                   store::MakeConnection connections);

  /// The lease as the server has it now. Nothing: there is one of that name already.
  Result<std::optional<KubernetesLease>> create(const KubernetesLease& lease, TimePoint deadline);
  /// Nothing: there is none.
  Result<std::optional<KubernetesLease>> get(const std::string& name, TimePoint deadline);
  /// Replaces the object of `lease.uid` at `lease.revision`. Nothing: it is not that any more.
  Result<std::optional<KubernetesLease>> update(const KubernetesLease& lease, TimePoint deadline);
  /// Removes the object of `lease.uid`, if it still has `lease.revision` (0: any). Another object
  /// of the same name stays.
  Status remove(const KubernetesLease& lease, TimePoint deadline);

  struct FollowOptions {
    /// Called with all leases of the job, and the revision of that list: at the beginning, and when
    /// changes may have been missed.
    std::function<void(std::int64_t, const std::vector<KubernetesLease>&)> on_list{};
    /// Called with each change after that, in order.
    std::function<void(const LeaseEvent&)> on_event{};
    /// Called every `idle` while a watch is open.
    std::function<void()> on_idle{};
    Duration idle = std::chrono::milliseconds(200);  // limit: pace of attempts
    /// Follow fails with the last error once no watch has worked for so long; negative: no limit.
    /// Time in which this process stood still does not count.
    Duration lost_limit{-1};
    /// A watch that has been silent for so long is begun anew with a list, in case its other end is
    /// gone.
    Duration silence_limit = std::chrono::seconds(15);  // limit: patience with a stream
  };
  /// Follows the job's leases until the calling thread is interrupted.
  Status follow(const FollowOptions& options);

  /// "the Kubernetes API at https://10.0.0.1:443".
  std::string name() const { return "the Kubernetes API at " + options_.server; }

 private:
  class LeaseStream;
  struct HttpReply {
    int status = 0;
    std::string body;
  };
  struct LeaseList {
    std::int64_t revision = 0;
    std::vector<KubernetesLease> leases{};
  };
  Result<store::HttpRequest> request(const char* method, std::string path, std::string body) const;
  /// Code::ok, refused or store; Code::network: another attempt may end better.
  Status judge(int http_status, const std::string& body) const;
  Result<HttpReply> call(const char* method, const std::string& path, const std::string& body,
                         TimePoint deadline);
  Result<std::optional<KubernetesLease>> lease_in(const HttpReply& reply) const;
  Result<LeaseList> list(TimePoint deadline);
  std::string encode(const KubernetesLease& lease) const;
  std::string collection() const;
  std::string selector() const;

  const KubernetesOptions options_;
  const std::string job_;
  std::atomic<unsigned> served_ = 0;  // a bit for each method: token and Role were right
  store::ConnectionPool connections_;
};

/// A valid value of a label that stands for `text`: `text` itself where it is one, else what is
/// readable of it and a digest.
std::string label_value(std::string_view text);
/// A valid name of an object: what is readable of `job` and `name`, and a digest of both.
std::string object_name(std::string_view job, std::string_view name);

/// Decodes one line of a watch. Nothing: a bookmark, which sets `revision`. Code::closed: changes
/// have been missed, so list anew. Code::store: it is no such line.
Result<std::optional<LeaseEvent>> decode_lease_event(std::string_view line, std::int64_t& revision);

}  // namespace muster::membership
