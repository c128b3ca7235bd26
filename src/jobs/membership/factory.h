// SPDX-License-Identifier: BSD-3-Clause
/// Makes memberships. Their classes are private to `membership/`.
#pragma once

#include <memory>
#include <string>

#include "core/security/secret.h"
#include "core/store/etcd/client.h"
#include "core/store/factory.h"
#include "jobs/membership/membership.h"

namespace muster::membership {

/// Kind "agent": the server of `store`, which node 0's agent runs, keeps the names and the epoch.
/// The end of a holder's connection ends its holds at once; `ttl` is for hosts that fall silent.
/// That agent is a single point of failure: with it the membership is gone, and `Watch::next` fails
/// with Code::network. `run_id`: the job's name; several jobs may share one server. `timeout`: of
/// each call.
/// A watch asks a server that is silent again and again, and fails with Code::network after
/// `watch_limit`, or at once where its connection ends and no other can be made; `timeout` limits
/// each call.
Result<std::unique_ptr<Membership>> make_agent_membership(std::shared_ptr<store::TcpStore> store,
                                                          const std::string& run_id,
                                                          Duration timeout, Duration watch_limit);

/// Kind "etcd": names are keys with leases below `prefix`/run/`run_id`/, the epoch is a key there.
/// Survives the death of any minority of the cluster's members. `ttl` of a hold is whole seconds,
/// at least 2. A node that no longer reaches a majority of the cluster loses its holds after their
/// `ttl`, and its watches fail with Code::network after `watch_limit`, which should be no shorter
/// than the holds' `ttl`: that half of a divided job stops. `timeout` limits each call. Values
/// carry proofs of the job's `secret`: a name without one is not there, and where the epoch has
/// none, `Watch::next` and `commit` fail with Code::refused.
Result<std::unique_ptr<Membership>> make_etcd_membership(store::etcd::ClientOptions options,
                                                         const std::string& prefix,
                                                         const std::string& run_id, Secret secret,
                                                         Duration timeout, Duration watch_limit);

struct KubernetesOptions {
  std::string server;          ///< "https://host:port"; http only on this host
  std::string token_file;      ///< bearer token, read for each request; not there: none is sent
  std::string authority_file;  ///< PEM of the server's authority; empty: the system's
  std::string name_space;
};
/// Those of a pod's service account, each replaced by its variable MUSTER_KUBERNETES_*, and the
/// server by `server` unless that is empty. Code::invalid_argument: none is known.
Result<KubernetesOptions> kubernetes_options(const std::string& server);

/// Kind "kubernetes": names and the epoch are Leases with the label muster.dev/job=`run_id`.
/// A process that watches, or wants the name, removes a Lease that by that process's clock has not
/// been renewed for its time: names of dead holders go as long as a watch of the job is open. `ttl`
/// of a hold is whole seconds, at least 2. Watches fail with Code::network once the API has been
/// silent for `watch_limit`, which should be no shorter than the `ttl`; `timeout` limits each call.
/// Values carry proofs of the job's `secret`, as those in etcd. The record of an epoch, and each
/// value, has at most 190 KiB (Code::exhausted).
Result<std::unique_ptr<Membership>> make_kubernetes_membership(const KubernetesOptions& options,
                                                               const std::string& run_id,
                                                               Secret secret, Duration timeout,
                                                               Duration watch_limit);

}  // namespace muster::membership
