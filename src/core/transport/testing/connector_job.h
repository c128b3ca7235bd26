// SPDX-License-Identifier: BSD-3-Clause
/// For tests of the socket connector: ranks, threads or forked processes, that meet over a
/// blackboard and talk over streams.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "core/shm/arena/arena.h"
#include "core/transport/connect/socket_connector.h"
#include "core/transport/factory.h"
#include "core/transport/testing/transfer_expectations.h"
#include "testing/limits.h"
#include "testing/network_namespaces.h"
#include "testing/rank_processes.h"

namespace muster::transport::connector_test {

using testing::NetworkNamespaces;
using testing::RankProcesses;
using testing::SharedCounter;

inline constexpr const char* kSecret = "a secret for tests only";

/// Texts that ranks, threads or forked processes, leave for each other.
class Blackboard {
 public:
  explicit Blackboard(int world_size)
      : world_size_(world_size),
        slots_(static_cast<char*>(
            ::mmap(nullptr, kRounds * static_cast<std::size_t>(world_size) * kSlot,
                   PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Blackboard() { ::munmap(slots_, kRounds * static_cast<std::size_t>(world_size_) * kSlot); }

  /// Everybody's texts of this round (each rank counts its own rounds).
  std::vector<std::string> exchange(int rank, int round, const std::string& mine) {
    char* const slot = slot_of(round, rank);
    const auto length = static_cast<std::uint32_t>(mine.size());
    std::memcpy(slot, &length, sizeof length);
    std::memcpy(slot + sizeof length, mine.data(), mine.size());
    arrived_.add(1);
    EXPECT_TRUE(arrived_.wait_for((round + 1) * world_size_, muster::testing::kMustHappen))
        << "rank " << rank << " round " << round;
    std::vector<std::string> all;
    for (int each = 0; each < world_size_; ++each) {
      std::uint32_t size = 0;
      std::memcpy(&size, slot_of(round, each), sizeof size);
      all.emplace_back(slot_of(round, each) + sizeof size, size);
    }
    return all;
  }

 private:
  static constexpr std::size_t kRounds = 16;
  static constexpr std::size_t kSlot = 2048;
  char* slot_of(int round, int rank) {
    return slots_ + (static_cast<std::size_t>(round * world_size_ + rank)) * kSlot;
  }

  int world_size_;
  char* slots_;
  SharedCounter arrived_;
};

/// Notes the events of a connector, and uses it in place of a fabric.
class TestRank final : public ConnectorEvents {
 public:
  TestRank(ConnectorOptions options, Blackboard& board, Secret secret = Secret::given(kSecret))
      : rank_(options.rank),
        board_(board),
        connector_(make_socket_connector(std::move(options), std::move(secret))) {}

  Status join() {
    auto contact = connector_->own_address(TimePoint::max());
    if (!contact) return contact.status();
    contacts = exchange(*contact);
    auto verdict = connector_->meet(contacts, soon());
    if (!verdict) return verdict.status();
    return connector_->settle(exchange(*verdict), *this);
  }
  std::vector<std::string> exchange(const std::string& mine) {
    return board_.exchange(rank_, round_++, mine);
  }
  void barrier() { exchange(""); }

  void on_stream(int peer, std::unique_ptr<ByteStream> stream) override {
    ++streams_reported;
    streams[peer] = std::move(stream);
  }
  void on_connect_failed(int peer, Status cause) override { failures[peer] = std::move(cause); }
  void on_death(int peer, Status evidence) override {
    ++death_reports[peer];
    deaths[peer] = std::move(evidence);
  }

  /// Polls until `done`, asleep in between on the descriptor as a watcher is; false after a long
  /// time.
  bool until(const std::function<bool()>& done, Duration limit = muster::testing::kMustHappen) {
    const TimePoint end = steady_clock().now() + limit;
    while (!done()) {
      const TimePoint now = steady_clock().now();
      if (now >= end) return false;
      if (connector_->poll(now)) continue;
      pollfd wait{connector_->descriptor(), POLLIN, 0};
      ::poll(&wait, 1, 1);
    }
    return true;
  }
  bool linked(int peer) {
    connector_->connect(peer, soon());
    return until([&] { return streams.contains(peer) || failures.contains(peer); }) &&
           streams.contains(peer);
  }
  /// Sends and receives `bytes` patterned bytes at once.
  bool talk(int peer, std::size_t bytes) {
    if (!until([&] { return streams.contains(peer); })) return false;
    std::vector<std::byte> out(bytes), in(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
      out[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(rank_));
    std::size_t sent = 0, got = 0;
    const bool moved = until([&] {
      const std::array<ConstBytes, 2> pieces{ConstBytes(out).subspan(sent, (bytes - sent) / 3),
                                             ConstBytes(out).subspan(sent + (bytes - sent) / 3)};
      const auto now_sent = streams[peer]->write(pieces);
      const std::array<MutableBytes, 1> room{MutableBytes(in).subspan(got)};
      const auto now_got = streams[peer]->read(room);
      EXPECT_TRUE(now_sent.ok()) << now_sent.status().message();
      EXPECT_TRUE(now_got.ok()) << now_got.status().message();
      if (!now_sent.ok() || !now_got.ok()) return true;
      sent += *now_sent;
      got += *now_got;
      return sent == bytes && got == bytes && !streams[peer]->has_unsent();
    });
    for (std::size_t i = 0; i < bytes; ++i) {
      if (in[i] != static_cast<std::byte>(i * 7 + static_cast<std::size_t>(peer))) return false;
    }
    return moved;
  }

  Connector& connector() { return *connector_; }

  std::vector<std::string> contacts;
  int streams_reported = 0;
  std::map<int, int> death_reports;
  std::map<int, std::unique_ptr<ByteStream>> streams;
  std::map<int, Status> failures;
  std::map<int, Status> deaths;

 private:
  int rank_;
  int round_ = 0;
  Blackboard& board_;
  std::unique_ptr<Connector> connector_;
};

inline ConnectorOptions options_of(int rank, int world_size, bool shared_memory = true) {
  ConnectorOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.job = "test";
  options.shared_memory = shared_memory;
  options.ring_bytes = 8192;
  options.segment_bytes = std::size_t{1} << 24;
  return options;
}

inline void run_threads(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (auto& thread : threads) thread.join();
}

/// Runs `body` in a process for each rank; what fails there is the report, and so fails here.
inline void run_processes(int world_size, const std::function<void(int)>& body,
                          const std::set<int>& killed = {}) {
  RankProcesses processes(world_size, [&](int rank) {
    // An exception in a child must not reach the test's frame, which would go on in it.
    try {
      body(rank);
    } catch (const std::exception& error) {
      return std::string("threw ") + error.what();
    }
    return std::string(::testing::Test::HasFailure() ? "failed" : "passed");
  });
  const auto ends = processes.join(muster::testing::kMustHappen);
  for (int rank = 0; rank < world_size; ++rank) {
    if (!killed.contains(rank)) {
      EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, "passed") << "rank " << rank;
    }
  }
}

inline void all_talk(TestRank& rank, int me, int world_size, std::size_t bytes) {
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != me) rank.connector().connect(peer, soon());
  }
  for (int step = 1; step < world_size; ++step) {
    // Pairs meet in an order that suits all: peer = step xor me, for powers of two.
    const int peer = me ^ step;
    EXPECT_TRUE(rank.talk(peer, bytes)) << "rank " << me << " with " << peer;
    EXPECT_EQ(rank.streams[peer]->kind(),
              std::string(rank.connector().region() != nullptr ? "shm" : "tcp"));
  }
  rank.barrier();
  EXPECT_EQ(rank.streams_reported, world_size - 1);
  EXPECT_TRUE(rank.failures.empty());
}

}  // namespace muster::transport::connector_test
