// SPDX-License-Identifier: BSD-3-Clause
// A rank that gives up joining: the others hear of it, and why.
#include <atomic>
#include <thread>

#include "core/store/job_keys.h"
#include "core/store/request.h"
#include "core/store/server/lingering_servers.h"
#include "core/store/testing/rendezvous_job.h"
#include "testing/budget.h"

namespace muster::store {
namespace {

using namespace rendezvous_test;

// spec: B1 rank 0, which hosts the store, gives up first: those who come later hear that at once,
// and why; the address is free for the next attempt
TEST(Rendezvous, RankZeroGivesUpFirst) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  const Status gave_up = rendezvous({method, 0, 3, "", kInVain}).status();
  EXPECT_EQ(gave_up.ranks(), (std::vector<int>{1, 2})) << gave_up.message();
  for (const int late : {2, 1}) {
    const Status told = rendezvous({method, late, 3, "", kLong}).status();
    EXPECT_EQ(told.code(), Code::peer_failed);
    EXPECT_EQ(told.ranks(), std::vector<int>{0}) << told.message();
    EXPECT_TRUE(mentions(told, "rank 0 gave up waiting for ranks 1 and 2")) << told.message();
  }
  expect_met(on_threads(ranks_of(method, 3, true)));
}

// spec: B1 attempts at other addresses of the same port do not end what the late ranks are told
TEST(Rendezvous, LateRanksAreToldAtEachAddressOfAPort) {
  const Environment environment({});
  const std::string port = std::to_string(testing::reserve_port());
  const std::vector<std::string> methods{"tcp://127.0.0.1:" + port, "tcp://127.0.0.2:" + port};
  const auto give_up = [](const std::string& method) {
    const Status gave_up = rendezvous({method, 0, 2, "", kInVain}).status();
    EXPECT_EQ(gave_up.ranks(), std::vector<int>{1}) << gave_up.message();
  };
  const auto come_late = [](const std::string& method) {
    const Status told = rendezvous({method, 1, 2, "", kLong}).status();
    EXPECT_EQ(told.code(), Code::peer_failed);
    EXPECT_TRUE(mentions(told, "rank 0 gave up waiting for rank 1")) << told.message();
  };
  for (const std::string& method : methods) give_up(method);
  for (const std::string& method : methods) come_late(method);
  // An attempt at every address takes the place of one at a single address.
  give_up(methods.front());
  give_up("tcp://0.0.0.0:" + port);
  come_late(methods.front());
  expect_met(on_threads(ranks_of(methods.front(), 2, true)));
}

// ThreadSanitizer starts no threads in a child of a process with several.
#if !defined(__SANITIZE_THREAD__)
// spec: B1 rank 0, which hosts the store, gives up and ends because of another rank: that one is
// named, to a rank that asks only then
TEST(Rendezvous, NamesTheRankForWhichRankZeroGaveUp) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  int gave_up[2];
  ASSERT_EQ(::pipe(gave_up), 0);
  Child zero([&]() -> bool {
    {
      const auto mine = rendezvous({method, 0, 2, "", kLong});
      if (!mine.ok()) return false;
      abandon(mine->store, Status(Code::refused, "rank 1 belongs to another user", {1}));
    }
    if (::write(gave_up[1], "x", 1) != 1) return false;
    std::exit(0);
  });
  const auto mine = rendezvous({method, 1, 2, "", kLong});
  ASSERT_TRUE(mine.ok()) << mine.status().message();
  char byte;
  ASSERT_EQ(::read(gave_up[0], &byte, 1), 1);
  const Status status = mine->store->all_gather("meeting", 1, 2, "one", kLong).status();
  EXPECT_EQ(status.ranks(), std::vector<int>{1}) << status.message();
  EXPECT_TRUE(mentions(status, "rank 0 gave up joining: rank 1 belongs to another user"))
      << status.message();
}

// spec: B1 rank 0, which hosts the store, is killed after another rank has given up: those who come
// later learn that nobody serves there, and where to look for the reason
TEST(Rendezvous, NamesTheHostOfAStoreThatWasKilled) {
  const Environment environment({});
  TcpStoreOptions place;
  place.host = "127.0.0.1";
  place.port = testing::reserve_port();
  place.timeout = kLong;
  int inside[2];
  ASSERT_EQ(::pipe(inside), 0);
  Child zero([&]() -> bool {
    place.is_server = true;
    const auto store = made(make_tcp_store(place));
    // If two claim rank 0, one is told so: then the other is inside.
    const auto claim = [&] {
      const Status end = rendezvous_over(store, {"", 0, 3, "", kLong}).status();
      return end.code() != Code::mismatch || ::write(inside[1], "x", 1) == 1;
    };
    auto other = std::async(std::launch::async, claim);
    return claim() && other.get() && ::pause() != 0;
  });
  ::close(inside[1]);
  char byte;
  ASSERT_EQ(::read(inside[0], &byte, 1), 1);
  ::close(inside[0]);
  const auto store = made(make_tcp_store(place));
  ASSERT_NE(store, nullptr);
  const std::string key = join_key("", "");
  // The time to wait runs at the store, from when it has the request.
  const auto ask = store->connect(steady_clock().now() + kLong);
  ASSERT_TRUE(ask.ok()) << ask.status().message();
  const Status gave_up = (*ask)
                             ->exchange({.op = StoreOp::all_gather,
                                         .timeout = kShort,
                                         .index = 1,
                                         .members = 3,
                                         .keys = {key},
                                         .values = {"one"}},
                                        steady_clock().now() + kLong)
                             .status;
  EXPECT_EQ(gave_up.code(), Code::timed_out) << gave_up.message();
  EXPECT_EQ(gave_up.ranks(), std::vector<int>{2}) << gave_up.message();
  zero.kill();
  const std::string method = "tcp://127.0.0.1:" + std::to_string(place.port);
  const Status told = rendezvous({method, 2, 3, "", kShort}).status();
  EXPECT_EQ(told.code(), Code::timed_out);
  EXPECT_EQ(told.ranks(), std::vector<int>{0}) << told.message();
  for (const char* const words : {"nobody listens there", "rank 0 or the launcher", "has ended",
                                  "errors of the ranks that had"})
    EXPECT_TRUE(mentions(told, words)) << told.message();
}

// A forked child does not wait for what another thread of its parent had locked.
TEST(Rendezvous, AChildForkedDuringAnAttemptMakesItsOwn) {
  if (testing::kSanitized)
    GTEST_SKIP() << "a fork may catch a lock of the sanitizer's that another thread holds";
  const Environment environment({});
  const std::string shared = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over) {
      auto options = server_options();
      options.multi_tenant = true;
      EXPECT_TRUE(make_tcp_store(options).ok());
      LingeringServers::of_process().make_room(*SocketAddress::numeric("127.0.0.1", 1));
    }
  });
  for (int i = 0; i < 100; ++i) {
    Child child([]() -> bool {
      auto options = server_options("192.0.2.1");  // of no host
      options.multi_tenant = true;
      options.timeout = Duration::zero();
      LingeringServers::of_process().make_room(*SocketAddress::numeric("127.0.0.1", 1));
      return !make_tcp_store(options).ok();
    });
    EXPECT_TRUE(child.succeeded());
  }
  over = true;
  busy.join();
}
#endif

}  // namespace
}  // namespace muster::store
