// What the others hear of a rank that gives up joining.
#include "muster/store/testing/rendezvous_job.h"

namespace muster::store {
namespace {

using namespace rendezvous_test;

// spec: B1 rank 0, which hosts the store, gives up first: those who come later hear that at once,
// and why; the address is free for the next attempt
TEST(Rendezvous, RankZeroGivesUpFirst) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  const Status gave_up = rendezvous({method, 0, 3, "", seconds(3)}).status();
  EXPECT_EQ(gave_up.ranks(), (std::vector<int>{1, 2})) << gave_up.message();
  for (const int late : {2, 1}) {
    const Status told = rendezvous({method, late, 3, "", kLong}).status();
    EXPECT_EQ(told.code(), Code::peer_failed);
    EXPECT_EQ(told.ranks(), std::vector<int>{0}) << told.message();
    EXPECT_TRUE(mentions(told, "rank 0 gave up waiting for ranks 1 and 2")) << told.message();
  }
  expect_met(on_threads(ranks_of(method, 3, true)));
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
#endif

}  // namespace
}  // namespace muster::store
