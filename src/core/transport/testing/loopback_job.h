// SPDX-License-Identifier: BSD-3-Clause
/// For tests: a job whose ranks are threads of this process over a LoopbackHub.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/transport/fabric.h"
#include "core/transport/factory.h"
#include "core/transport/testing/transfer_expectations.h"

namespace muster::transport {

/// A generous limit for whatever should happen at once.

inline MutableBytes writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

/// Text that tells its place: a wrong byte anywhere shows.
inline std::string pattern(std::size_t bytes, std::uint64_t seed) {
  std::string text(bytes, '\0');
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (char& c : text) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    c = static_cast<char>(state >> 56);
  }
  return text;
}

struct LoopbackJob {
  explicit LoopbackJob(int ranks, bool with_region = false)
      : ranks(ranks), hub(make_loopback_hub(ranks, with_region)) {}

  Result<std::unique_ptr<Fabric>> join(int rank) {
    FabricOptions mine = options;
    mine.rank = rank;
    mine.world_size = ranks;
    return Fabric::create(
        mine, hub->connector(rank),
        [this, rank](const std::string& round, const std::string& text) {
          return Result<std::vector<std::string>>(hub->exchange(round, rank, text));
        });
  }
  /// Runs `body` as every rank and ends when all have.
  void run(const std::function<void(Fabric&)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        auto fabric = join(r);
        if (!fabric) {
          ADD_FAILURE() << fabric.status().message();
          return;
        }
        body(**fabric);
      });
    }
    for (auto& thread : threads) thread.join();
  }

  int ranks;
  std::shared_ptr<LoopbackHub> hub;
  FabricOptions options;
};

}  // namespace muster::transport
