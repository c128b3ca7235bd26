// SPDX-License-Identifier: BSD-3-Clause
/// Helpers of this folder's tests for exceptions and eventual conditions.
#pragma once

#include <gtest/gtest.h>

#include <torch/types.h>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/transport/fabric.h"
#include "core/transport/factory.h"
#include "muster/rpc_calls.h"
#include "rpc/backends.h"
#include "testing/limits.h"
#include "testing/thrown.h"

namespace muster::rpc::testing {
/// The message of `call`'s exception; a test failure if it throws none.
template <class Call>
std::string thrown_by(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}
#define EXPECT_SAYS(call, part)                                              \
  do {                                                                       \
    const std::string said = muster::rpc::testing::thrown_by([&] { call; }); \
    EXPECT_NE(said.find(part), std::string::npos) << "in: " << said;         \
  } while (false)

/// Waits for `condition`, driving messages; the limit is reached only if there is a defect.
inline bool soon(const std::function<bool()>& condition) {
  const auto agent = current_agent("soon");
  return agent->wait(condition, agent->clock().now() + muster::testing::kMustHappen);
}

// Runs workers as threads of this process over the in-memory fabric, for this folder's tests.

using muster::testing::message_of;

inline constexpr Duration kSoon = muster::testing::kMustHappen;

/// One job; worker r is named "worker<r>".
struct Workers {
  explicit Workers(int count, RpcBackendOptions options = {})
      : count(count), options(std::move(options)), hub(transport::make_loopback_hub(count, true)) {}

  std::unique_ptr<transport::Fabric> fabric(int rank) {
    transport::FabricOptions mine;
    mine.rank = rank;
    mine.world_size = count;
    mine.heartbeat_limit = std::chrono::seconds(30);  // tolerates a loaded machine
    auto made = transport::Fabric::create(
        mine, hub->connector(rank),
        [this, rank](const std::string& round, const std::string& text) {
          return Result<std::vector<std::string>>(hub->exchange(round, rank, text));
        });
    if (!made.ok()) throw std::runtime_error(made.status().message());
    return std::move(made).value();
  }
  static std::string name(int rank) { return "worker" + std::to_string(rank); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (int rank = 0; rank < count; ++rank) all.push_back(name(rank));
    return all;
  }
  /// Runs each worker on its own thread: init, body, and shutdown unless the body did it.
  void run(const std::function<void(int)>& body, bool graceful = true) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] {
        const RpcScope::Binding binding(std::make_shared<RpcScope>());
        try {
          auto mine = fabric(rank);
          init_rpc_on(wrap ? wrap(std::move(mine)) : std::move(mine), names(), options);
          body(rank);
          if (is_initialized()) shutdown(graceful, graceful ? kSoon : Duration::zero());
        } catch (const std::exception& error) {
          ADD_FAILURE() << "worker " << rank << ": " << error.what();
          if (is_initialized()) shutdown(false);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

  int count;
  RpcBackendOptions options;
  std::shared_ptr<transport::LoopbackHub> hub;
  /// Wraps each worker's fabric in `run`; null: no wrapper.
  std::function<std::unique_ptr<transport::Fabric>(std::unique_ptr<transport::Fabric>)> wrap;
};

inline void on_workers(int count, const std::function<void(int)>& body,
                       RpcBackendOptions options = {}) {
  Workers(count, std::move(options)).run(body);
}

}  // namespace muster::rpc::testing
