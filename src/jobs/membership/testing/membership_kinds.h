// SPDX-License-Identifier: BSD-3-Clause
/// Every kind of membership, for suites that run over all of them. A suite takes a class
///
///   struct AgentKind {
///     AgentKind();  // starts what the kind needs (a server, say), with a new job
///     static std::string missing();  // why this machine cannot test it; empty: it can
///     // The job, as one more process sees it.
///     std::unique_ptr<Membership> open(const ServiceLimits& limits = {}) const;
///     Duration ttl() const;  // short, and long enough for a machine that is busy
///   };
///
/// `open` also works in a forked child, which some tests kill.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "jobs/membership/factory.h"
#include "testing/etcd_cluster.h"
#include "testing/kubernetes_api.h"
#include "testing/limits.h"

namespace muster::membership::testing {

/// How long a process waits for the service.
struct ServiceLimits {
  Duration call = muster::testing::kMustHappen;
  Duration watch = muster::testing::kMustHappen;
};

/// A job of its own for each test of a process.
inline std::string next_job() {
  static int count = 0;
  return "Job " + std::to_string(count++);
}

inline std::unique_ptr<Membership> opened(Result<std::unique_ptr<Membership>> made) {
  if (made) return std::move(*made);
  ADD_FAILURE() << made.status().message();
  return nullptr;
}

/// A server for each job.
struct AgentKind {
  AgentKind() {
    store::TcpStoreOptions serving = options();
    serving.port = 0;
    serving.is_server = true;
    server = *store::make_tcp_store(serving);
  }
  static std::string missing() { return {}; }
  Duration ttl() const { return std::chrono::seconds(2); }
  std::unique_ptr<Membership> open(const ServiceLimits& limits = {}) const {
    store::TcpStoreOptions joining = options();
    joining.port = server->port();
    auto store = store::make_tcp_store(joining);
    if (!store) return opened(store.status());
    return opened(make_agent_membership(*store, "job", limits.call, limits.watch));
  }

  static store::TcpStoreOptions options() {
    store::TcpStoreOptions options;
    options.host = "127.0.0.1";
    options.secret = Secret::given("a secret for the tests");
    options.role = Handshake::Role::launcher;
    options.wait_for_workers = false;
    options.timeout = muster::testing::kMustHappen;
    return options;
  }

  std::shared_ptr<store::TcpStore> server;
};

/// One server for all tests of this process, a job for each.
struct EtcdKind {
  static std::string missing() {
    using muster::testing::EtcdCluster;
    return EtcdCluster::installed() ? std::string() : EtcdCluster::kMissing;
  }
  static muster::testing::EtcdCluster& cluster() {
    static muster::testing::EtcdCluster one;
    return one;
  }
  Duration ttl() const { return std::chrono::seconds(2); }
  std::unique_ptr<Membership> open(const ServiceLimits& limits = {}) const {
    return opened(make_etcd_membership(
        {.endpoints = cluster().endpoints(), .user = {}, .password = {}, .tls = {}}, "test", job,
        Secret::given("a secret for the tests"), limits.call, limits.watch));
  }
  const std::string job = next_job();
};

/// As EtcdKind.
struct KubernetesKind {
  static std::string missing() {
    using muster::testing::KubernetesApi;
    return KubernetesApi::installed() ? std::string() : KubernetesApi::kMissing;
  }
  static muster::testing::KubernetesApi& api() {
    static muster::testing::KubernetesApi one;
    return one;
  }
  Duration ttl() const { return std::chrono::seconds(2); }
  std::unique_ptr<Membership> open(const ServiceLimits& limits = {}) const {
    return opened(make_kubernetes_membership(
        api().options(), job, Secret::given("a secret for the tests"), limits.call, limits.watch));
  }
  const std::string job = next_job();
};

}  // namespace muster::membership::testing
