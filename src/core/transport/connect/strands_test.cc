// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/strands.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "core/transport/testing/connector_job.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
namespace {

using namespace connector_test;
using namespace std::chrono_literals;

Descriptor any_descriptor() { return Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

// spec: X4.connections as many connections as the round trip asks
TEST(Strands, GoByTheRoundTrip) {
  EXPECT_EQ(strands_for(0us, 20ms, 16), 1) << "it is not known";
  EXPECT_EQ(strands_for(100us, 20ms, 16), 1);
  EXPECT_EQ(strands_for(20ms, 20ms, 16), 1);
  EXPECT_EQ(strands_for(20'001us, 20ms, 16), 2);
  EXPECT_EQ(strands_for(200ms, 20ms, 16), 10);
  EXPECT_EQ(strands_for(2s, 20ms, 16), 16);
  EXPECT_EQ(strands_for(2s, 20ms, 1), 1);
  EXPECT_EQ(strands_for(3600s, 1ns, INT64_MAX), kMostStrands);
}

// spec: X4.connections the defaults have 1 Gbit/s at 200 ms in flight, by what one connection has
TEST(Strands, HaveAGigabitInFlightOverALongWay) {
  const Tunables& values = default_tunables();
  constexpr double kBytesInFlight = 125e6 * 0.2;
  constexpr double kOfOne = 3.0 * 1024 * 1024;  // of receive buffers of 6 MiB, half is window
  EXPECT_GE(strands_for(200ms, values.strand_trip, values.most_strands) * kOfOne, kBytesInFlight);
}

// A call with little time has a link when a single connection can be had in it.
TEST(Strands, TakeNoTimeThatASingleConnectionNeeds) {
  EXPECT_TRUE(has_time_for_bundle(200ms, 10s));
  EXPECT_FALSE(has_time_for_bundle(200ms, 1500ms));
  EXPECT_FALSE(has_time_for_bundle(1s, 10s));
  EXPECT_TRUE(has_time_for_bundle(200ms, TimePoint::max() - TimePoint{}));
}

TEST(Strands, NoGreetingMayAskForOthersThanThereAre) {
  EXPECT_TRUE(is_possible({}));
  EXPECT_TRUE(is_possible({.number = 63, .of = 64}));
  EXPECT_FALSE(is_possible({.number = 0, .of = 0}));
  EXPECT_FALSE(is_possible({.number = 2, .of = 2}));
  EXPECT_FALSE(is_possible({.number = 0, .of = 65}));
}

TEST(Strands, BundleTakesEachOfItsOwnOnce) {
  Bundle bundle({.number = 0, .of = 2, .bundle = 7}, TimePoint::max());
  EXPECT_TRUE(bundle.lacks({.number = 1, .of = 2, .bundle = 7}));
  EXPECT_FALSE(bundle.lacks({.number = 1, .of = 2, .bundle = 6}));
  EXPECT_FALSE(bundle.lacks({.number = 1, .of = 3, .bundle = 7}));
  bundle.add(1, {.socket = GuardedDescriptor(any_descriptor()), .tls = {}, .peer = {}});
  EXPECT_FALSE(bundle.lacks({.number = 1, .of = 2, .bundle = 7}));
  EXPECT_FALSE(bundle.is_whole());
  EXPECT_EQ(bundle.missing(), 1u);
  bundle.add(0, {.socket = GuardedDescriptor(any_descriptor()), .tls = {}, .peer = {}});
  EXPECT_TRUE(bundle.is_whole());
}

/// In a rank's process: every way counts as long enough for so many connections.
void bundle_all(std::int64_t strands) {
  tunables_detail::in_force.strand_trip = Duration(1);
  tunables_detail::in_force.most_strands = strands;
}

/// In a rank's process.
void allow_descriptors(rlim_t most) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = most;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

std::ptrdiff_t open_sockets() {
  namespace fs = std::filesystem;
  return std::count_if(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator(),
                       [](const fs::directory_entry& entry) {
                         std::error_code ignored;
                         return fs::read_symlink(entry, ignored).string().starts_with("socket:");
                       });
}

// spec: X4.connections a link is made of several connections, as both sides see it
TEST(BundledLinks, HaveAllTheirConnections) {
  Blackboard board(2);
  run_processes(2, [&](int me) {
    bundle_all(5);
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const std::ptrdiff_t before = open_sockets();
    rank.barrier();
    if (me == 0) rank.connector().connect(1, soon());
    EXPECT_TRUE(rank.talk(1 - me, 3'000'000));
    EXPECT_EQ(open_sockets() - before, 5);
    rank.barrier();
  });
}

// Both sides of every pair connect at once, and one link comes of it.
TEST(BundledLinks, CrossingOnesAreSettled) {
  Blackboard board(4);
  run_processes(4, [&](int me) {
    bundle_all(4);
    TestRank rank(options_of(me, 4, false), board);
    ASSERT_TRUE(rank.join().ok());
    rank.barrier();
    all_talk(rank, me, 4, 300'000);
  });
}

// spec: X4.connections a link that cannot have them all is one connection
TEST(BundledLinks, AreOneConnectionWhereDescriptorsRunOut) {
  Blackboard board(2);
  run_processes(2, [&](int me) {
    bundle_all(16);
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const std::ptrdiff_t before = open_sockets();
    rank.barrier();
    if (me == 0) {
      const int free = any_descriptor().get();  // the lowest number
      allow_descriptors(static_cast<rlim_t>(free) + 3);
      rank.connector().connect(1, soon());
    }
    EXPECT_TRUE(rank.talk(1 - me, 100'000));
    if (me == 1) {
      EXPECT_EQ(open_sockets() - before, 1);
    }
    rank.barrier();
  });
}

/// How many connections a link has that rank 0 makes, which would be of so many.
void expect_connections(std::int64_t wanted, std::array<rlim_t, 2> descriptors,
                        std::ptrdiff_t expected) {
  Blackboard board(2);
  run_processes(2, [&](int me) {
    bundle_all(wanted);
    allow_descriptors(descriptors[static_cast<std::size_t>(me)]);
    TestRank rank(options_of(me, 2, false), board);
    ASSERT_TRUE(rank.join().ok());
    const std::ptrdiff_t before = open_sockets();
    rank.barrier();
    if (me == 0) rank.connector().connect(1, soon());
    EXPECT_TRUE(rank.talk(1 - me, 100'000));
    EXPECT_TRUE(rank.until([&] { return open_sockets() - before == expected; }))
        << open_sockets() - before;
    rank.barrier();
  });
}

// The program needs descriptors for files of its own.
TEST(BundledLinks, TakeAQuarterOfTheDescriptorsAtMost) { expect_connections(64, {128, 128}, 33); }

// The peer may have fewer than the rank that connects knows of.
TEST(BundledLinks, AreOneConnectionWhereTheyWouldTakeMoreOfThePeersDescriptors) {
  expect_connections(40, {400, 100}, 1);
}

// spec: X4.connections a peer that is killed is noticed over a bundle as over one connection
TEST(BundledLinks, EndWithTheirPeer) {
  Blackboard board(2);
  run_processes(2,
                [&](int me) {
                  bundle_all(5);
                  TestRank rank(options_of(me, 2, false), board);
                  ASSERT_TRUE(rank.join().ok());
                  if (me == 0) rank.connector().connect(1, soon());
                  EXPECT_TRUE(rank.talk(1 - me, 100'000));
                  rank.barrier();
                  if (me == 1) ::raise(SIGKILL);
                  Status end;
                  EXPECT_TRUE(rank.until([&] {
                    std::array<std::byte, 100> bytes;
                    const MutableBytes room(bytes);
                    const auto got = rank.streams[1]->read({&room, 1});
                    if (!got) end = got.status();
                    return !got.ok();
                  }));
                  EXPECT_EQ(end.code(), Code::closed) << end.message();
                },
                {1});
}

}  // namespace
}  // namespace muster::transport
