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
  TimePoint silent_until() const override { return silence; }
  const Status& said;
  TimePoint silence{};
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

// spec: L14.node a lost place is told in words for people: since when, what the launcher does; the
// service's own words lie apart; and that it is had again
TEST_F(KeptPlaceTest, ItsLossAndReturnAreToldInPlainWords) {
  EXPECT_EQ(look(), PlaceChange::none);
  now += seconds(6);
  said = Status(Code::refused, "the hold of \"muster/run/x\" is lost: renew: ...");
  EXPECT_EQ(look(), PlaceChange::gone);
  EXPECT_EQ(news.text,
            "this node has lost its place in the job, which it had 6 s ago: etcd at h gives a "
            "place up when it does not hear of the launcher in time (one that was stopped, a "
            "network that failed); the launcher asks for it again, and its workers go on unless "
            "the job goes on without them, or for 60 s");
  EXPECT_EQ(news.cause, said.message());
  now += seconds(1);
  said = Status();
  place.take(std::make_unique<SaidHold>(said));
  EXPECT_EQ(look(), PlaceChange::back);
  EXPECT_EQ(news.text, "this node has a place in the job again, after 1 s");
  EXPECT_TRUE(news.cause.empty());
  said = Status(Code::timed_out, "no word");
  EXPECT_EQ(look(false), PlaceChange::gone);
  EXPECT_NE(news.text.find(": etcd at h does not answer; the launcher asks for it again"),
            std::string::npos)
      << news.text;
}

// spec: L14.end a node without workers has none to give up
TEST_F(KeptPlaceTest, WithoutWorkersThereIsNothingToGiveUp) {
  said = Status(Code::timed_out, "no word");
  EXPECT_EQ(look(false), PlaceChange::gone);
  now += seconds(600);
  EXPECT_EQ(look(false), PlaceChange::none);
}

// spec: L14.service a node that kept its place through the service's silence expects the others
// back for as long as one that lost its own
TEST_F(KeptPlaceTest, OthersMayReturnAfterASilence) {
  const auto until = [&] { return place.others_return_until(now, seconds(5), seconds(1)); };
  EXPECT_EQ(until(), TimePoint{});
  auto hold = std::make_unique<SaidHold>(said);
  SaidHold& held = *hold;
  place.take(std::move(hold));
  held.silence = TimePoint::max();
  EXPECT_EQ(until(), now + seconds(1)) << "it is silent still";
  held.silence = now - seconds(2);
  EXPECT_EQ(until(), now + seconds(3));
  said = Status(Code::timed_out, "no word");
  EXPECT_EQ(look(), PlaceChange::gone);
  said = Status();
  EXPECT_EQ(look(), PlaceChange::back);
  EXPECT_EQ(until(), now + seconds(5));
}

}  // namespace
}  // namespace muster::launch
