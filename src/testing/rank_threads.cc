// SPDX-License-Identifier: BSD-3-Clause
#include "testing/rank_threads.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "core/collective/op.h"
#include "core/security/secret.h"
#include "core/store/factory.h"
#include "testing/limits.h"

namespace muster::testing {
namespace {

bool in_memory(Wire wire) { return wire == Wire::loopback || wire == Wire::region; }

std::unique_ptr<transport::Connector> socket_connector(const RankThreadsOptions& options, int rank,
                                                       const std::string& job) {
  transport::ConnectorOptions connector;
  connector.rank = rank;
  connector.world_size = options.ranks;
  connector.job = job;
  connector.shared_memory = options.wire != Wire::tcp;
  connector.host_label = host_label(options.wire, rank);
  return transport::make_socket_connector(std::move(connector),
                                          Secret::given("a secret for tests only"));
}

/// Counts the fabrics that live. A group that was dropped without being closed may outlive its rank
/// on its progress thread, and its fabric with it. The caller waits here for all fabrics, because
/// it may end the process next. `lock_` guards `left_`; the last reference to this is in the
/// deleter of the last fabric.
class Departures : public std::enable_shared_from_this<Departures> {
 public:
  std::shared_ptr<transport::Fabric> follow(std::unique_ptr<transport::Fabric> fabric) {
    const std::lock_guard guard(lock_);
    ++left_;
    return {fabric.release(), [self = shared_from_this()](transport::Fabric* gone) {
              delete gone;
              const std::lock_guard guard(self->lock_);
              --self->left_;
              self->changed_.notify_all();
            }};
  }
  void wait() {
    std::unique_lock guard(lock_);
    changed_.wait_for(guard, muster::testing::kMustHappen, [this] { return left_ == 0; });
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  int left_ = 0;
};

}  // namespace

const char* wire_name(Wire wire) {
  switch (wire) {
    case Wire::loopback: return "loopback";
    case Wire::region: return "region";
    case Wire::tcp: return "tcp";
    case Wire::shm: return "shm";
    case Wire::mixed: return "mixed";
    case Wire::hosts: return "hosts";
  }
  return "?";
}

std::string host_label(Wire wire, int rank) {
  if (wire == Wire::mixed) return rank % 2 == 0 ? "even" : "odd";
  return wire == Wire::hosts ? "pair" + std::to_string(rank / 2) : "";
}

void run_ranks(const RankThreadsOptions& options, const RankBody& body) {
  static std::atomic<int> jobs{0};
  const std::string job = "rank-threads-" + std::to_string(jobs.fetch_add(1));
  auto hub = options.hub;
  const bool region = options.wire == Wire::region;
  if (in_memory(options.wire) && hub == nullptr)
    hub = transport::make_loopback_hub(options.ranks, region, region ? options.ranks : 0);
  const auto store = store::make_hash_store(options.timeout);

  std::barrier<> gate(options.ranks);
  std::atomic<bool> all_met{true};
  std::mutex lock;
  std::string trouble;
  const auto departures = std::make_shared<Departures>();
  const auto run = [&](int rank) {
    transport::FabricOptions fabric_options;
    fabric_options.rank = rank;
    fabric_options.world_size = options.ranks;
    fabric_options.timeout = options.timeout;
    fabric_options.heartbeat_limit = options.heartbeat_limit;
    fabric_options.threads = options.threads;
    fabric_options.rules = &collective::fingerprint_rules();
    auto connector =
        in_memory(options.wire) ? hub->connector(rank) : socket_connector(options, rank, job);
    const transport::Exchange exchange =
        in_memory(options.wire)
            ? transport::Exchange([&](const std::string& round,
                                      const std::string& mine) -> Result<std::vector<std::string>> {
                return hub->exchange(round, rank, mine);
              })
            : transport::exchange_over(store, job, rank, options.ranks,
                                       deadline_after(steady_clock(), options.timeout));
    auto made = transport::Fabric::create(fabric_options, std::move(connector), exchange);
    if (!made.ok()) {
      all_met.store(false);
      const std::lock_guard guard(lock);
      trouble += "rank " + std::to_string(rank) + " over " + wire_name(options.wire) +
                 " has no fabric: " + made.status().message() + "\n";
    }
    gate.arrive_and_wait();
    std::shared_ptr<transport::Fabric> fabric;
    if (made.ok()) fabric = departures->follow(std::move(*made));
    if (all_met.load()) body(rank, fabric);
    gate.arrive_and_wait();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  departures->wait();
  if (!all_met.load()) throw std::runtime_error(trouble);
}

}  // namespace muster::testing
