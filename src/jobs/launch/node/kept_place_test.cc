// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/kept_place.h"

#include <gtest/gtest.h>

namespace muster::launch {
namespace {

using std::chrono::seconds;

/// A hold of which the service says what the test wants.
struct SaidHold final : membership::Hold {
  explicit SaidHold(const Status& said) : said(said) {}
  Status set(std::string_view) override { return said; }
  Status state() const override { return said; }
  TimePoint expires() const override { return TimePoint::max(); }
  const Status& said;
};

struct KeptPlaceTest : ::testing::Test {
  KeptPlaceTest() { place.take(std::make_unique<SaidHold>(said)); }
  PlaceChange look(bool has_workers = true) {
    news = place.look(now, has_workers);
    return news.what;
  }
  Status said;
  TimePoint now{seconds(1000)};
  KeptPlace place{{.service = "etcd at h", .out_limit = seconds(60), .last_call = seconds(5)}};
  PlaceNews news;
};

// spec: L14.service a service that is silent for less than its limit ends nothing
TEST_F(KeptPlaceTest, ASilenceEndsNothing) {
  EXPECT_EQ(look(), PlaceChange::none);
  said = Status(Code::timed_out, "no word");
  EXPECT_EQ(look(), PlaceChange::gone);
  EXPECT_TRUE(place.hold());
  now += seconds(59);
  EXPECT_EQ(look(), PlaceChange::none);
  EXPECT_TRUE(place.is_out());
  said = Status();
  EXPECT_EQ(look(), PlaceChange::back);
  EXPECT_EQ(place.returned_at(), now);
  EXPECT_FALSE(place.is_out());
}

// spec: L14.service after its limit the workers are given up once, with the time that the service
// was silent, and the hold is given back
TEST_F(KeptPlaceTest, AfterItsLimitTheWorkersAreGivenUpOnce) {
  said = Status(Code::timed_out, "no word");
  EXPECT_EQ(look(), PlaceChange::gone);
  now += seconds(61);
  EXPECT_EQ(look(), PlaceChange::given_up);
  EXPECT_NE(news.text.find("etcd at h has not answered for 61 s"), std::string::npos) << news.text;
  EXPECT_FALSE(place.hold());
  EXPECT_TRUE(place.take_lost());
  now += seconds(61);
  EXPECT_EQ(look(), PlaceChange::none);
}

// spec: L14.node a hold that is lost is given back and another is taken: the node has its place
// again
TEST_F(KeptPlaceTest, AnotherHoldIsTheSamePlace) {
  said = Status(Code::refused, "it is gone");
  EXPECT_EQ(look(), PlaceChange::gone);
  EXPECT_TRUE(news.lost_hold);
  EXPECT_TRUE(place.take_lost());
  EXPECT_FALSE(place.take_lost());
  said = Status();
  place.take(std::make_unique<SaidHold>(said));
  EXPECT_EQ(look(), PlaceChange::back);
}

// spec: L14.end a node without workers has none to give up
TEST_F(KeptPlaceTest, WithoutWorkersThereIsNothingToGiveUp) {
  said = Status(Code::timed_out, "no word");
  EXPECT_EQ(look(false), PlaceChange::gone);
  now += seconds(600);
  EXPECT_EQ(look(false), PlaceChange::none);
}

}  // namespace
}  // namespace muster::launch
