// SPDX-License-Identifier: BSD-3-Clause
// The cost of an idle fabric: wake-ups of its watcher, counted by the kernel.

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

#include "core/transport/engine/engine_wait.h"
#include "testing/limits.h"
#include "testing/rank_threads.h"

namespace muster::transport {
namespace {

/// How often the watchers of this process have gone to sleep by now.
std::uint64_t watchers_sleeps() {
  std::uint64_t sleeps = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    if (!(std::ifstream(task.path() / "comm") >> name) || name != "muster-watcher") continue;
    std::ifstream status(task.path() / "status");
    for (std::string word; status >> word;) {
      std::uint64_t count = 0;
      if (word == "voluntary_ctxt_switches:" && status >> count) sleeps += count;
      status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    }
  }
  return sleeps;
}

// Four heartbeats a second, and looks that fall together with them; twenty looks while something
// happens.
TEST(Watcher, WakesSeldomWhileNothingHappens) {
  constexpr int kRanks = 2;
  constexpr std::uint64_t kMost = kRanks * 7;
  constexpr auto kWindow = std::chrono::seconds(1);
  testing::RankThreadsOptions options;
  options.ranks = kRanks;
  options.wire = testing::Wire::shm;
  options.heartbeat_limit = std::chrono::milliseconds(2500);
  std::barrier<> gate(kRanks);
  run_ranks(options, [&](int rank, std::shared_ptr<Fabric> fabric) {
    // The ring between the two stands, so there is something to look at.
    std::string there(8, 'x'), here(8, ' ');
    Channel& channel = fabric->bootstrap();
    const TransferRef receive =
        channel.receive(1 - rank, 1, std::as_writable_bytes(std::span(here)), {});
    const TransferRef send = channel.send(1 - rank, 1, std::as_bytes(std::span(there)), {});
    EXPECT_TRUE(fabric->wait([&] { return receive->done() && send->done(); },
                             steady_clock().now() + muster::testing::kMustHappen));
    EXPECT_EQ(here, there);
    gate.arrive_and_wait();
    if (rank == 0) {
      std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
      for (int window = 0; window < 60 && least > kMost; ++window) {
        const std::uint64_t before = watchers_sleeps();
        std::this_thread::sleep_for(kWindow);  // the very nothing that is measured
        least = std::min(least, watchers_sleeps() - before);
      }
      EXPECT_LE(least, kMost) << "wake-ups of " << kRanks << " watchers in a second";
      EXPECT_GE(least, 1u) << "nobody watches";
    }
    gate.arrive_and_wait();
    // The watcher finds later messages by itself: no pass is made here.
    std::string late(8, ' ');
    const TransferRef awaited =
        channel.receive(1 - rank, 2, std::as_writable_bytes(std::span(late)), {});
    const TransferRef sent = channel.send(1 - rank, 2, std::as_bytes(std::span(there)), {});
    const TimePoint limit = steady_clock().now() + muster::testing::kMustHappen;
    while (!awaited->done() && steady_clock().now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(awaited->done());
    EXPECT_EQ(late, there);
    gate.arrive_and_wait();
  });
}

}  // namespace
}  // namespace muster::transport
