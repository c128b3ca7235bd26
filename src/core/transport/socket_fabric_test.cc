// SPDX-License-Identifier: BSD-3-Clause
/// The fabric over sockets and shared memory, between real processes and across network namespaces.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>

#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/store/factory.h"
#include "core/transport/fabric.h"
#include "core/transport/factory.h"
#include "core/transport/peer_address.h"
#include "core/transport/testing/transfer_expectations.h"
#include "core/tunables/tunables.h"
#include "testing/limits.h"
#include "testing/network_namespaces.h"
#include "testing/rank_processes.h"
#include "testing/sampled_cells.h"

namespace muster::transport {
namespace {

using testing::NetworkNamespaces;
using testing::RankProcesses;
using testing::SharedCounter;

enum class Wire { shm, tcp, bundles, mixed, hosts };

/// A job of processes that meet over a file; ranks of `hosts` live in network namespaces of their
/// own.
class ProcessFabric : public testing::SampledCells<Wire> {
 protected:
  void start(int world_size) {
    world_size_ = world_size;
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::string unique = name;
    for (char& each : unique) each = each == '/' ? '_' : each;
    path_ =
        (std::filesystem::temp_directory_path() / ("muster-" + std::to_string(::getpid()) + unique))
            .string();
    std::filesystem::remove(path_);
    if (GetParam() == Wire::hosts) {
      auto net = NetworkNamespaces::create(world_size);
      ASSERT_TRUE(net.ok()) << net.status().message();
      net_ = std::move(*net);
    }
  }
  void TearDown() override { std::filesystem::remove(path_); }

  /// In a rank's process.
  std::unique_ptr<Fabric> join(int rank, std::vector<std::string>* contacts = nullptr) {
    if (net_) {
      EXPECT_TRUE(net_->enter(rank).ok());
    }
    if (GetParam() == Wire::bundles) {  // every way counts as a long one
      tunables_detail::in_force.strand_trip = Duration(1);
      tunables_detail::in_force.most_strands = 4;
    }
    auto store = store::make_file_store(path_, -1, muster::testing::kMustHappen);
    if (!store) return nullptr;
    ConnectorOptions options;
    options.rank = rank;
    options.world_size = world_size_;
    options.job = "fabric test";
    options.shared_memory = GetParam() != Wire::tcp && GetParam() != Wire::bundles;
    options.ring_bytes = 16 * 1024;
    options.segment_bytes = std::size_t{1} << 24;
    if (net_) options.towards = net_->address(0);
    if (GetParam() == Wire::mixed) options.host_label = rank % 2 == 0 ? "even" : "odd";
    FabricOptions fabric_options;
    fabric_options.rank = rank;
    fabric_options.world_size = world_size_;
    fabric_options.timeout = muster::testing::kMustHappen;
    const Exchange over_store =
        exchange_over(*store, "meeting", rank, world_size_,
                      deadline_after(steady_clock(), fabric_options.timeout));
    const Exchange exchange = [&](const std::string& round, const std::string& mine) {
      auto all = over_store(round, mine);
      if (all.ok() && contacts != nullptr && contacts->empty()) *contacts = *all;
      return all;
    };
    auto fabric = Fabric::create(
        fabric_options, make_socket_connector(options, Secret::given("a secret for tests only")),
        exchange);
    EXPECT_TRUE(fabric.ok()) << fabric.status().message();
    return fabric.ok() ? std::move(*fabric) : nullptr;
  }

  void run(const std::function<void(int)>& body, const std::set<int>& killed = {}) {
    RankProcesses processes(world_size_, [&](int rank) {
      body(rank);
      return std::string(::testing::Test::HasFailure() ? "failed" : "passed");
    });
    const auto ends = processes.join(muster::testing::kMustHappen);
    for (int rank = 0; rank < world_size_; ++rank) {
      if (killed.contains(rank)) continue;
      EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, "passed") << "rank " << rank;
    }
  }

  int world_size_ = 0;
  std::string path_;
  std::unique_ptr<NetworkNamespaces> net_;
};

const char* name_of(Wire wire) {
  switch (wire) {
    case Wire::shm: return "shm";
    case Wire::tcp: return "tcp";
    case Wire::bundles: return "bundles";
    case Wire::mixed: return "mixed";
    case Wire::hosts: return "hosts";
  }
  return "";
}
INSTANTIATE_TEST_SUITE_P(Wires, ProcessFabric,
                         ::testing::Values(Wire::shm, Wire::tcp, Wire::bundles, Wire::mixed,
                                           Wire::hosts),
                         [](const auto& info) { return name_of(info.param); });

std::string pattern(std::size_t bytes, std::size_t seed) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i)
    text[i] = static_cast<char>(i * 31 + seed * 17 + (i >> 9));
  return text;
}

MutableBytes writable(std::string& text) {
  return std::as_writable_bytes(std::span(text.data(), text.size()));
}

/// Every pair at once, in both directions, messages from nothing to more than every buffer on the
/// way.
void exchange_with_all(Fabric& fabric) {
  Channel& channel = fabric.bootstrap();
  const int world_size = fabric.world_size();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{5}, std::size_t{4096},
                                  std::size_t{70'001}, std::size_t{1'500'000}}) {
    std::vector<TransferRef> transfers;
    std::vector<std::string> out(static_cast<std::size_t>(world_size)),
        in(static_cast<std::size_t>(world_size));
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == fabric.rank()) continue;
      const auto at = static_cast<std::size_t>(peer);
      out[at] = pattern(bytes, static_cast<std::size_t>(fabric.rank() * world_size + peer));
      in[at].assign(bytes, 'x');
      transfers.push_back(channel.receive(peer, bytes, writable(in[at]), {}));
      transfers.push_back(channel.send(peer, bytes, as_bytes(out[at]), {}));
    }
    for (const TransferRef& transfer : transfers) {
      const Status done = finish(fabric, transfer);
      ASSERT_TRUE(done.ok()) << done.message();
    }
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == fabric.rank()) continue;
      EXPECT_EQ(in[static_cast<std::size_t>(peer)],
                pattern(bytes, static_cast<std::size_t>(peer * world_size + fabric.rank())));
    }
  }
}

TEST_P(ProcessFabric, TwoProcessesExchange) {
  start(2);
  run([&](int rank) {
    auto fabric = join(rank);
    ASSERT_NE(fabric, nullptr);
    exchange_with_all(*fabric);
  });
}

TEST_P(ProcessFabric, FourProcessesExchangeInEveryPair) {
  start(4);
  run([&](int rank) {
    auto fabric = join(rank);
    ASSERT_NE(fabric, nullptr);
    exchange_with_all(*fabric);
    const std::vector<int> hosts(fabric->hosts().begin(), fabric->hosts().end());
    switch (GetParam()) {
      case Wire::mixed: EXPECT_EQ(hosts, (std::vector<int>{0, 1, 0, 1})); break;
      case Wire::hosts: EXPECT_EQ(hosts, (std::vector<int>{0, 1, 2, 3})); break;
      default: EXPECT_EQ(hosts, (std::vector<int>{0, 0, 0, 0}));
    }
  });
}

// spec: X4.links a link over sockets has figures, memory of one host has none
TEST_P(ProcessFabric, TellsWhatWasMeasuredOfItsLinks) {
  start(2);
  SharedCounter asked;
  run([&](int rank) {
    auto fabric = join(rank);
    ASSERT_NE(fabric, nullptr);
    exchange_with_all(*fabric);
    const auto figures = fabric->link_figures();
    // A link whose peer has left has no figures any more.
    asked.add(1);
    asked.wait_for(2, muster::testing::kMustHappen);
    ASSERT_EQ(figures.size(), GetParam() == Wire::shm ? 0u : 1u);
    for (const auto& [peer, found] : figures) {
      EXPECT_EQ(peer, 1 - rank);
      EXPECT_GT(found.sent, 0u);
      EXPECT_GT(found.round_trip.count(), 0);
    }
  });
}

// The culprit is named, never a rank that gave up because of it.
TEST_P(ProcessFabric, KilledRankIsNamedByAllOthers) {
  start(3);
  SharedCounter received;
  run(
      [&](int rank) {
        auto fabric = join(rank);
        ASSERT_NE(fabric, nullptr);
        exchange_with_all(*fabric);
        received.add(1);
        received.wait_for(3, muster::testing::kMustHappen);
        if (rank == 1) ::kill(::getpid(), SIGKILL);
        std::string never(8, 'x');
        const TransferRef receive = fabric->bootstrap().receive(1, 99, writable(never), {});
        const Status ended = finish(*fabric, receive, muster::testing::kMustHappen);
        EXPECT_EQ(ended.code(), Code::peer_failed) << ended.message();
        EXPECT_EQ(ended.ranks(), std::vector<int>({1})) << ended.message();
      },
      {1});
}

// Each rank logs the death, under its engine's lock, and nobody reads what it logs.
// spec: H2 a full standard error stops nobody
TEST_P(ProcessFabric, ADeathIsToldWhereNobodyReadsStandardError) {
  start(3);
  SharedCounter received;
  run(
      [&](int rank) {
        std::array<int, 2> ends{};
        ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
        for (const std::string some(4096, 'x'); ::write(ends[1], some.data(), some.size()) > 0;) {
        }
        ::fcntl(ends[1], F_SETFL, 0);
        ::dup2(ends[1], STDERR_FILENO);
        set_log_level(LogLevel::trace);
        auto fabric = join(rank);
        ASSERT_NE(fabric, nullptr);
        exchange_with_all(*fabric);
        received.add(1);
        received.wait_for(3, muster::testing::kMustHappen);
        if (rank == 1) ::kill(::getpid(), SIGKILL);
        std::string never(8, 'x');
        const Status ended =
            finish(*fabric, fabric->bootstrap().receive(1, 99, writable(never), {}),
                   muster::testing::kMustHappen);
        EXPECT_EQ(ended.ranks(), std::vector<int>({1})) << ended.message();
      },
      {1});
}

// The process goes on, and is no rank any more. Without an end of the process and of any connection
// the others look at its memory.
TEST_P(ProcessFabric, ARankThatRunsAnotherProgramIsNamedByAllOthers) {
  start(3);
  SharedCounter received, victim, seen;
  run(
      [&](int rank) {
        auto fabric = join(rank);
        ASSERT_NE(fabric, nullptr);
        exchange_with_all(*fabric);
        if (rank == 1) victim.add(::getpid());
        // If the system lets no process read another's memory, the heartbeat tells it. So it does
        // for a rank that is replaced before the first look.
        shm::HostRegion* const region = fabric->region();
        const bool reads = region == nullptr || region->can_read(1);
        received.add(1);
        received.wait_for(3, muster::testing::kMustHappen);
        if (rank == 1) {
          ::execl("/bin/sleep", "sleep", "100", nullptr);
          ::_exit(1);
        }
        std::string never(8, 'x');
        const TransferRef receive = fabric->bootstrap().receive(1, 99, writable(never), {});
        const Status ended = finish(*fabric, receive, muster::testing::kMustHappen);
        EXPECT_EQ(ended.code(), Code::peer_failed) << ended.message();
        EXPECT_EQ(ended.ranks(), std::vector<int>({1})) << ended.message();
        if (reads) {
          EXPECT_EQ(ended.message().find("has not answered for"), std::string::npos)
              << ended.message();
        }
        seen.add(1);
        if (rank == 0) {
          seen.wait_for(2, muster::testing::kMustHappen);
          ::kill(victim.value(), SIGKILL);
        }
      },
      {1});
}

// A data loader's worker of the dead rank lives on with copies of everything that the handlers of
// fork() did not close.
TEST_P(ProcessFabric, KilledRankIsNamedWhileItsForkedChildLivesOn) {
  start(3);
  SharedCounter received, forked, seen;
  run(
      [&](int rank) {
        auto fabric = join(rank);
        ASSERT_NE(fabric, nullptr);
        exchange_with_all(*fabric);
        received.add(1);
        received.wait_for(3, muster::testing::kMustHappen);
        if (rank == 2) {
          if (::fork() == 0) {
            forked.add(1);
            seen.wait_for(2, muster::testing::kMustHappen);
            ::_exit(0);
          }
          forked.wait_for(1, muster::testing::kMustHappen);
          ::kill(::getpid(), SIGKILL);
        }
        std::string never(8, 'x');
        const Status ended =
            finish(*fabric, fabric->bootstrap().receive(2, 99, writable(never), {}),
                   muster::testing::kMustHappen);
        seen.add(1);
        EXPECT_EQ(ended.code(), Code::peer_failed) << ended.message();
        EXPECT_EQ(ended.ranks(), std::vector<int>({2})) << ended.message();
      },
      {2});
}

// Unauthenticated peers connect to every link port all the while: they send random bytes, or a
// single byte and then nothing.
TEST_P(ProcessFabric, UnauthenticatedPeersDoNotDisturb) {
  start(2);
  run([&](int rank) {
    std::vector<std::string> contacts;
    auto fabric = join(rank, &contacts);
    ASSERT_NE(fabric, nullptr);
    std::vector<SocketAddress> ports;
    for (int peer = 0; peer < 2; ++peer)
      ports.push_back(
          decode_peer_address(contacts[static_cast<std::size_t>(peer)], peer)->addresses[0]);
    std::vector<Descriptor> silent;
    for (int i = 0; i < 300; ++i) {
      const SocketAddress& port = ports[static_cast<std::size_t>(i % 2)];
      Descriptor outsider(::socket(port.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
      ASSERT_EQ(::connect(outsider.get(), port.raw(), port.length()), 0);
      const std::string noise =
          i % 3 == 0 ? "m"
                     : pattern(static_cast<std::size_t>(i), static_cast<std::size_t>(i + rank));
      static_cast<void>(::send(outsider.get(), noise.data(), noise.size(), MSG_NOSIGNAL));
      if (i % 3 == 0) silent.push_back(std::move(outsider));
    }
    exchange_with_all(*fabric);
  });
}

TEST_P(ProcessFabric, ForkedChildrenDoNotDisturb) {
  start(2);
  SharedCounter finished;
  run([&](int rank) {
    auto fabric = join(rank);
    ASSERT_NE(fabric, nullptr);
    exchange_with_all(*fabric);
    const pid_t child = ::fork();
    if (child == 0) {
      // As a data loader's worker: it lives on until the test ends, then leaves by way of
      // destructors.
      finished.wait_for(2, muster::testing::kMustHappen);
      fabric.reset();
      ::_exit(0);
    }
    exchange_with_all(*fabric);
    finished.add(1);
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    exchange_with_all(*fabric);
  });
}

// Threads of one process share its region and its rings.
TEST(ThreadFabric, FourThreadsExchangeOverSharedMemoryAndSockets) {
  for (const bool shared_memory : {true, false}) {
    auto store = store::make_hash_store(muster::testing::kMustHappen);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        ConnectorOptions options;
        options.rank = rank;
        options.world_size = 4;
        options.shared_memory = shared_memory;
        options.ring_bytes = 16 * 1024;
        options.segment_bytes = std::size_t{1} << 24;
        FabricOptions fabric_options;
        fabric_options.rank = rank;
        fabric_options.world_size = 4;
        fabric_options.timeout = muster::testing::kMustHappen;
        auto fabric =
            Fabric::create(fabric_options,
                           make_socket_connector(options, Secret::given("a secret for tests only")),
                           exchange_over(store, "meeting", rank, 4,
                                         deadline_after(steady_clock(), fabric_options.timeout)));
        ASSERT_TRUE(fabric.ok()) << fabric.status().message();
        exchange_with_all(**fabric);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace muster::transport
