// SPDX-License-Identifier: BSD-3-Clause
// Leases, watches and epochs, on a clock that stands where the test puts it.

#include "core/store/server/lease_table.h"

#include <gtest/gtest.h>

namespace muster::store {
namespace {

using std::chrono::seconds;
using Kind = LeaseNews::Item::Kind;

class Leases : public ::testing::Test {
 protected:
  Ticket ask(const Request& request) {
    Answers answers;
    table.submit(++ticket, request, now, answers);
    keep(answers);
    return ticket;
  }
  void keep(Answers& answers) {
    for (auto& answer : answers)
      EXPECT_TRUE(replies.emplace(answer.ticket, std::move(answer.reply)).second)
          << "a second answer to one request";
  }
  void advance(Duration time) {
    now += time;
    Answers answers;
    table.expire(now, answers);
    keep(answers);
  }
  std::int64_t hold(std::string_view name, std::string_view value = "v",
                    Duration ttl = seconds(3)) {
    return replies
        .at(ask(
            {.op = StoreOp::hold, .timeout = ttl, .number = 0, .keys = {name}, .values = {value}}))
        .number;
  }
  Ticket watch(std::int64_t known, Duration timeout = Duration(-1)) {
    return ask(
        {.op = StoreOp::watch, .timeout = timeout, .number = known, .keys = {"n/", "epoch"}});
  }
  Ticket commit(std::string_view number, std::int64_t expected) {
    return ask({.op = StoreOp::commit,
                .number = expected,
                .keys = {"epoch"},
                .values = {number, "record"}});
  }
  LeaseNews news(Ticket of) { return decode_lease_news(*replies.at(of).values.at(0)).value(); }
  std::int64_t revision(Ticket of) { return replies.at(of).number; }

  LeaseTable table;
  TimePoint now{seconds(1000)};
  Ticket ticket = 0;
  std::map<Ticket, Reply> replies;
};

// spec: L1 hold: ends after its time unless it is renewed; a late holder is refused
TEST_F(Leases, EndAfterTheirTime) {
  const std::int64_t lease = hold("n/a");
  advance(seconds(2));
  EXPECT_TRUE(
      replies
          .at(ask({.op = StoreOp::renew, .timeout = seconds(3), .number = lease, .keys = {"n/a"}}))
          .status.ok());
  EXPECT_EQ(table.next_deadline(), now + seconds(3));
  advance(seconds(3) - Duration(1));
  const Ticket waiting = watch(revision(watch(0)));
  EXPECT_FALSE(replies.contains(waiting));
  advance(Duration(1));
  ASSERT_TRUE(replies.contains(waiting));
  EXPECT_EQ(news(waiting).items.at(0).kind, Kind::silent);
  const Status late =
      replies
          .at(ask({.op = StoreOp::renew, .timeout = seconds(3), .number = lease, .keys = {"n/a"}}))
          .status;
  EXPECT_EQ(late.code(), Code::refused);
  EXPECT_NE(late.message().find("n/a"), std::string::npos) << late.message();
  EXPECT_EQ(table.next_deadline(), TimePoint::max());
}

// spec: L1 hold: a server that stood still for longer than the leases judges no lease lost for that
// time; afterwards it judges as before
TEST_F(Leases, DoNotEndByThePauseOfTheServer) {
  const std::int64_t first = hold("n/a", "v", seconds(2)), second = hold("n/b", "v", seconds(8));
  const std::int64_t endless = hold("n/c", "v", Duration(-1));
  const Ticket waiting = watch(revision(watch(0)), seconds(100));
  for (int pause = 0; pause < 3; ++pause) {
    advance(seconds(20));
    EXPECT_FALSE(replies.contains(waiting)) << "a lease was judged lost";
    EXPECT_EQ(table.next_deadline(), now + seconds(2));
  }
  const auto renews = [&](std::int64_t lease, std::string_view name, Duration ttl) {
    return replies.at(ask({.op = StoreOp::renew, .timeout = ttl, .number = lease, .keys = {name}}))
        .status.ok();
  };
  EXPECT_TRUE(renews(second, "n/b", seconds(8)));
  EXPECT_TRUE(renews(endless, "n/c", Duration(-1)));
  advance(seconds(2));
  ASSERT_TRUE(replies.contains(waiting)) << "its holder was silent while the server ran";
  ASSERT_EQ(news(waiting).items.size(), 1u);
  EXPECT_EQ(news(waiting).items[0].name, "n/a");
  EXPECT_FALSE(renews(first, "n/a", seconds(2)));
  EXPECT_TRUE(renews(second, "n/b", seconds(8)));
}

// spec: L14.node a server that is late again and again, by an eighth of a lease or by more, still
// ends that of a node that died, and no other
TEST_F(Leases, AServerThatIsAlwaysLateEndsThemToo) {
  for (const Duration late : {Duration(std::chrono::milliseconds(251)), Duration(seconds(60))}) {
    SCOPED_TRACE(describe(late));
    hold("n/dead", "v", seconds(2));
    const std::int64_t alive = hold("n/alive", "v", seconds(2));
    const Ticket waiting = watch(revision(watch(0)));
    int looks = 0;
    while (!replies.contains(waiting) && looks < 100) {
      ++looks;
      advance(table.next_deadline() - now + late);
      ask({.op = StoreOp::renew, .timeout = seconds(2), .number = alive, .keys = {"n/alive"}});
    }
    EXPECT_EQ(looks, kExcusedPauses + 1);
    ASSERT_EQ(news(waiting).items.size(), 1u);
    EXPECT_EQ(news(waiting).items[0].name, "n/dead");
    ask({.op = StoreOp::release, .number = alive, .keys = {"n/alive"}});
  }
}

// spec: L14.node a pause is a pause for the short leases too, if a long one is due with them
TEST_F(Leases, APauseCountsForEachLeaseByItsOwnTime) {
  hold("n/long", "v", seconds(80));
  advance(seconds(78));
  hold("n/short", "v", seconds(2));
  const Ticket waiting = watch(revision(watch(0)));
  advance(seconds(6));  // late by 4 s: a twentieth of the long one's time, twice the short one's
  EXPECT_FALSE(replies.contains(waiting)) << "a lease was judged lost";
}

// spec: L3 hold: the end of the holder's connection ends it at once
TEST_F(Leases, EndWithTheirConnection) {
  const std::int64_t lease = hold("n/a", "v", Duration(-1));
  const Ticket staying = ask({.op = StoreOp::stay, .number = lease, .keys = {"n/a"}});
  const Ticket waiting = watch(revision(watch(0)));
  Answers answers;
  EXPECT_TRUE(table.drop(staying, answers));
  keep(answers);
  EXPECT_EQ(news(waiting).items.at(0).kind, Kind::gone);
  answers.clear();
  EXPECT_FALSE(table.drop(staying, answers));
  EXPECT_NE(hold("n/a"), 0);
}

// spec: L1 watch: one entry for each name that changed, the last value of each
TEST_F(Leases, AWatchTellsWhatChanged) {
  const std::int64_t a = hold("n/a");
  hold("n/b");
  hold("other/c");
  const Ticket all = watch(0);
  EXPECT_TRUE(news(all).snapshot);
  EXPECT_EQ(news(all).items.size(), 2u);
  for (const char* value : {"1", "2", "3"})
    ask({.op = StoreOp::hold,
         .timeout = seconds(3),
         .number = a,
         .keys = {"n/a"},
         .values = {value}});
  const Ticket changed = watch(revision(all));
  ASSERT_EQ(news(changed).items.size(), 1u);
  EXPECT_FALSE(news(changed).snapshot);
  EXPECT_EQ(news(changed).items[0].value, "3");
  EXPECT_EQ(news(changed).items[0].revision, news(all).items[0].revision) << "the same lease";
  const Ticket nothing = watch(revision(changed), seconds(1));
  hold("other/d");
  EXPECT_FALSE(replies.contains(nothing));
  advance(seconds(1));
  EXPECT_TRUE(news(nothing).items.empty());
}

// A watcher that knows less than the table remembers of names that are gone sees all that is there.
TEST_F(Leases, AWatcherFarBehindGetsASnapshot) {
  const Ticket early = watch(0);
  for (int i = 0; i < 5000; ++i) {
    const std::string name = "n/" + std::to_string(i);
    const std::int64_t lease = hold(name);
    ask({.op = StoreOp::release, .number = lease, .keys = {name}});
  }
  hold("n/last");
  const Ticket late = watch(revision(early));
  EXPECT_TRUE(news(late).snapshot);
  EXPECT_EQ(news(late).items.size(), 1u);
}

// spec: L5 commit: compare-and-swap, and numbers that only grow
TEST_F(Leases, EpochsOnlyGrow) {
  const Ticket first = commit("3", 0);
  ASSERT_TRUE(replies.at(first).status.ok());
  EXPECT_EQ(table.epoch_of("epoch"), 3);
  EXPECT_EQ(replies.at(commit("4", 0)).status.code(), Code::refused);
  EXPECT_EQ(replies.at(commit("3", revision(first))).status.code(), Code::refused);
  EXPECT_EQ(replies.at(commit("none", revision(first))).status.code(), Code::invalid_argument);
  EXPECT_TRUE(replies.at(commit("4", revision(first))).status.ok());
  EXPECT_EQ(table.epoch_of("epoch"), 4);
  EXPECT_EQ(
      replies
          .at(ask({.op = StoreOp::hold, .timeout = seconds(1), .keys = {"epoch"}, .values = {"x"}}))
          .status.code(),
      Code::refused);
  const Ticket all = watch(0);
  ASSERT_EQ(news(all).items.size(), 1u);
  EXPECT_EQ(news(all).items[0].kind, Kind::record);
}

TEST(LeaseNewsBytes, WhatIsTornIsRefused) {
  const LeaseNews whole{true, {{Kind::held, "n/a", 7, "value"}, {Kind::gone, "n/b", 0, ""}}};
  const std::string bytes = encode(whole);
  ASSERT_TRUE(decode_lease_news(bytes).ok());
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode_lease_news(bytes.substr(0, length)).ok()) << length;
}

}  // namespace
}  // namespace muster::store
