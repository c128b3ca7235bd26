// SPDX-License-Identifier: BSD-3-Clause
// The rules of waiting and meeting, on a clock that stands where the test puts it.

#include "core/store/server/store_table.h"

#include <gtest/gtest.h>

#include "core/store/job_keys.h"

namespace muster::store {
namespace {

using std::chrono::seconds;

class TableTest : public ::testing::Test {
 protected:
  /// Submits and returns the reply if there is one at once. Replies to others pile up in `replies`.
  StoreTable::Ticket ask(const Request& request) {
    StoreTable::Answers answers;
    table.submit(++ticket, request, now, answers);
    keep(answers);
    return ticket;
  }
  void keep(StoreTable::Answers& answers) {
    for (auto& answer : answers)
      EXPECT_TRUE(replies.emplace(answer.ticket, std::move(answer.reply)).second)
          << "a second answer to one request";
  }
  void advance(Duration time) {
    now += time;
    StoreTable::Answers answers;
    table.expire(now, answers);
    keep(answers);
  }
  void drop(StoreTable::Ticket gone) {
    StoreTable::Answers answers;
    table.drop(gone, now, answers);
    keep(answers);
  }
  bool answered(StoreTable::Ticket asked) const { return replies.contains(asked); }
  const Status& status(StoreTable::Ticket asked) { return replies.at(asked).status; }

  static Request gather(std::string_view key, int index, int members,
                        Duration timeout = seconds(10)) {
    return {.op = StoreOp::all_gather,
            .timeout = timeout,
            .index = index,
            .members = members,
            .keys = {key},
            .values = {"value"}};
  }
  static Request barrier(std::string_view key, int members, Duration timeout = seconds(10)) {
    return {.op = StoreOp::barrier, .timeout = timeout, .members = members, .keys = {key}};
  }
  static Request set(std::string_view key) {
    return {.op = StoreOp::set, .keys = {key}, .values = {"value"}};
  }

  StoreTable table;
  TimePoint now{seconds(1000)};
  StoreTable::Ticket ticket = 0;
  std::map<StoreTable::Ticket, Reply> replies;
};

// spec: C7 timeout: exactly at the deadline, with the time waited
TEST_F(TableTest, GetTimesOutAtItsDeadline) {
  const auto get = ask({.op = StoreOp::get, .timeout = seconds(5), .keys = {"key"}});
  EXPECT_EQ(table.next_deadline(), now + seconds(5));
  advance(seconds(5) - Duration(1));
  EXPECT_FALSE(answered(get));
  advance(Duration(1));
  EXPECT_EQ(status(get).message(), "get(\"key\"): nobody set this key within 5 s");
  EXPECT_EQ(table.parked(), 0u);
  EXPECT_EQ(table.next_deadline(), TimePoint::max());
}

// spec: C7 a negative timeout: no limit
TEST_F(TableTest, NegativeTimeoutNeverExpires) {
  const auto get = ask({.op = StoreOp::get, .timeout = seconds(-1), .keys = {"key"}});
  advance(std::chrono::hours(100000));
  EXPECT_FALSE(answered(get));
  ask(set("key"));
  EXPECT_TRUE(status(get).ok());
}

// A key that came and was deleted again while another was awaited is still missing.
// spec: C10 wait: all keys at the same time
TEST_F(TableTest, WaitNoticesKeysThatWentAway) {
  const auto wait = ask({.op = StoreOp::wait, .timeout = seconds(5), .keys = {"a", "b"}});
  ask(set("a"));
  ask({.op = StoreOp::delete_key, .keys = {"a"}});
  ask(set("b"));
  EXPECT_FALSE(answered(wait));
  ask(set("a"));
  EXPECT_TRUE(status(wait).ok());
}

// spec: C14 queues: those who wait are served in the order in which they came
TEST_F(TableTest, PopsAreServedInOrder) {
  const auto first = ask({.op = StoreOp::queue_pop, .number = 1, .keys = {"queue"}});
  const auto second = ask({.op = StoreOp::queue_pop, .number = 1, .keys = {"queue"}});
  drop(first);
  ask({.op = StoreOp::queue_push, .keys = {"queue"}, .values = {"x"}});
  EXPECT_FALSE(answered(first));
  EXPECT_EQ(*replies.at(second).values.at(0), "x");
}

// spec: C14 all_gather: two members with one index are told, the rightful one is unharmed
TEST_F(TableTest, GatherNoticesOneIndexTwice) {
  const auto first = ask(gather("key", 0, 2));
  const auto twice = ask(gather("key", 0, 2));
  EXPECT_EQ(status(twice).code(), Code::mismatch);
  EXPECT_NE(status(twice).message().find("index 0"), std::string::npos);
  ask(gather("key", 1, 2));
  EXPECT_EQ(replies.at(first).values.size(), 2u);
}

// spec: C14 barrier, all_gather: members that disagree about their number are told
TEST_F(TableTest, MeetingsNoticeAnotherNumberOfMembers) {
  ask(gather("key", 0, 2));
  const auto other = ask(gather("key", 1, 3));
  EXPECT_EQ(status(other).code(), Code::mismatch);
  EXPECT_NE(status(other).message().find("2 members"), std::string::npos)
      << status(other).message();
  EXPECT_NE(status(other).message().find("for 3"), std::string::npos) << status(other).message();
  ask(barrier("key", 2));
  EXPECT_EQ(status(ask(barrier("key", 4))).code(), Code::mismatch);
}

// spec: C14 all_gather: the first deadline ends it for all with one cause; the late are told; then
// the key begins anew
TEST_F(TableTest, GatherEndsForAllAtTheFirstDeadline) {
  const auto zero = ask(gather("key", 0, 4, seconds(5)));
  const auto three = ask(gather("key", 3, 4, seconds(500)));
  advance(seconds(5));
  for (const auto member : {zero, three}) {
    EXPECT_EQ(status(member).message(),
              "all_gather(\"key\"): 2 of 4 members came within 5 s; missing: ranks 1 and 2");
    EXPECT_EQ(status(member).ranks(), (std::vector<int>{1, 2}));
  }
  EXPECT_EQ(status(ask(gather("key", 2, 4))).ranks(), (std::vector<int>{0, 3})) << "gave up";
  const auto again = ask(gather("key", 0, 4, seconds(5)));
  EXPECT_FALSE(answered(again));
  for (int index = 1; index < 4; ++index) ask(gather("key", index, 4));
  EXPECT_TRUE(status(again).ok());
}

// spec: C14 barrier: at the timeout says how many came
TEST_F(TableTest, BarrierSaysHowManyCame) {
  const auto one = ask(barrier("key", 3, seconds(5)));
  const auto two = ask(barrier("key", 3, seconds(50)));
  advance(seconds(5));
  EXPECT_EQ(status(one).message(), "barrier(\"key\"): 2 of 3 members came within 5 s");
  EXPECT_EQ(status(two).message(), status(one).message());
}

// spec: C14 all_gather: a member whose connection ends is named to all who wait, at once
TEST_F(TableTest, GatherNamesTheMemberThatIsGone) {
  const auto zero = ask(gather("key", 0, 3));
  const auto two = ask(gather("key", 2, 3));
  drop(two);
  EXPECT_FALSE(answered(two));
  EXPECT_EQ(status(zero).code(), Code::peer_failed);
  EXPECT_EQ(status(zero).ranks(), std::vector<int>{2});
  EXPECT_EQ(status(ask(gather("key", 1, 3))).ranks(), std::vector<int>{2});
  EXPECT_EQ(table.parked(), 0u);
}

// A member that has told where it belongs is missed as soon as it goes, also by those who come to a
// meeting only then; B1 a rank that ends after it has joined is named by whatever meeting of
// all ranks would need it
TEST_F(TableTest, RegistrationNamesTheRankThatIsGone) {
  std::vector<StoreTable::Ticket> registered;
  for (int rank = 0; rank < 3; ++rank)
    registered.push_back(
        ask({.op = StoreOp::register_member, .index = rank, .members = 3, .keys = {"job"}}));
  const auto waiting = ask(gather("job/first", 0, 3));
  const auto barred = ask(barrier("job/barrier", 3));
  const auto elsewhere = ask(gather("jobs/first", 0, 3));
  const auto few = ask(gather("job/few", 0, 2));
  const auto has_it = ask(gather("job/second", 2, 3));
  drop(has_it);  // as with a connection that ends: first what it waited for, then its registration
  drop(registered[2]);
  for (const auto ticket : {waiting, barred}) {
    EXPECT_EQ(status(ticket).code(), Code::peer_failed);
    EXPECT_EQ(status(ticket).ranks(), std::vector<int>{2}) << status(ticket).message();
  }
  EXPECT_FALSE(answered(elsewhere));
  EXPECT_FALSE(answered(few)) << "a meeting of fewer than all may be without it";
  EXPECT_EQ(status(ask(gather("job/later", 1, 3))).ranks(), std::vector<int>{2});
  EXPECT_EQ(status(ask(barrier("job/later", 3))).ranks(), std::vector<int>{2});
  ask({.op = StoreOp::leave, .index = 1, .keys = {"job"}});
  EXPECT_EQ(status(ask(barrier("job/more", 3))).ranks(), std::vector<int>{2});
  ask({.op = StoreOp::leave, .index = 0, .keys = {"job"}});
  EXPECT_FALSE(answered(ask(gather("job/new", 0, 3))))
      << "when all are gone the name is free again";
}

Request arrival(int rank, int members, std::string_view key) {
  return {.op = StoreOp::register_member, .index = rank, .members = members, .keys = {key}};
}

// A member that leaves in good order is missed too, and not called dead.
TEST_F(TableTest, NamesWhoHasLeft) {
  for (int rank = 0; rank < 2; ++rank) ask(arrival(rank, 2, "job"));
  ask({.op = StoreOp::leave, .index = 1, .keys = {"job"}});
  const Status missed = status(ask(barrier("job/more", 2)));
  EXPECT_NE(missed.message().find("rank 1 has left the job"), std::string::npos)
      << missed.message();
}

// spec: B1 a rank that gives up because another was killed is not named in its place, also to those
// who come last
TEST_F(TableTest, NamesTheFirstOfSeveralThatAreGone) {
  std::vector<StoreTable::Ticket> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.push_back(ask(arrival(rank, 4, "job")));
  drop(ranks[2]);  // killed
  EXPECT_EQ(status(ask(gather("job/contacts", 0, 4))).ranks(), std::vector<int>{2});
  drop(ranks[0]);  // rank 0 ends with that error
  for (const std::string key : {"job/contacts", "job/verdicts"})
    EXPECT_EQ(status(ask(gather(key, 1, 4))).ranks(), std::vector<int>{2}) << key;
  EXPECT_EQ(status(ask(barrier("job/barrier", 4))).ranks(), std::vector<int>{2});
}

// spec: B1 a rank that gives up says why: those who come later are told that, and the ranks that it
// blames; one that could not wait for longer is named itself
TEST_F(TableTest, NamesWhatTheOneThatGaveUpSays) {
  const auto abandon = [&](const std::string& key, int rank, const Status& why) {
    const std::string reason = encode_reason(why);
    ask({.op = StoreOp::abandon, .index = rank, .keys = {key}, .values = {reason}});
  };
  const Status blames(Code::peer_failed, "rank 2 cannot be reached", {2});
  for (const std::string& key : {join_key("", ""), std::string("job")}) {
    ask(arrival(0, 3, key));
    ask(arrival(1, 3, key));
    abandon(key, 0, blames);
    const Status told = status(ask(gather(key == "job" ? "job/first" : key, 1, 3)));
    EXPECT_EQ(told.ranks(), std::vector<int>{2});
    EXPECT_NE(told.message().find("rank 0 gave up joining: rank 2 cannot be reached"),
              std::string::npos)
        << told.message();
  }
  for (int rank = 0; rank < 3; ++rank) ask(arrival(rank, 3, "other"));
  abandon("other", 0, Status(Code::timed_out, "rank 1 did not come in time", {1}));
  EXPECT_EQ(status(ask(gather("other/first", 1, 3))).ranks(), std::vector<int>{0});
  // A reason that cannot be read hurts nobody.
  for (const char* reason : {"", "x", "\xff\xff\xff\xff"})
    EXPECT_EQ(
        why_left({.op = StoreOp::abandon, .index = 7, .keys = {"job"}, .values = {reason}}).ranks(),
        std::vector<int>{7});
}

// spec: B1 a rank that ends before it has come to the meeting in which all join is named to all,
// also to those who come later
TEST_F(TableTest, ArrivalNamesWhoIsGoneBeforeAllHaveJoined) {
  const std::string key = join_key("", "");
  std::vector<StoreTable::Ticket> arrived;
  for (int rank = 0; rank < 3; ++rank) arrived.push_back(ask(arrival(rank, 4, key)));
  const auto zero = ask(gather(key, 0, 4));
  drop(arrived[2]);
  EXPECT_EQ(status(zero).code(), Code::peer_failed);
  EXPECT_NE(status(zero).message().find("rank 2 has lost its connection"), std::string::npos)
      << status(zero).message();
  for (const int late : {1, 3})
    EXPECT_EQ(status(ask(gather(key, late, 4))).ranks(), std::vector<int>{2});
  // The others' end then does no harm to those who try again.
  drop(arrived[0]);
  drop(arrived[1]);
  std::vector<StoreTable::Ticket> again;
  for (int rank = 0; rank < 4; ++rank) {
    ask(arrival(rank, 4, key));
    again.push_back(ask(gather(key, rank, 4)));
  }
  for (const auto each : again) EXPECT_TRUE(status(each).ok()) << status(each).message();
}

// spec: B1 nobody waits for the first to come, which is gone again before anybody else is there
TEST_F(TableTest, TheFirstToArriveIsMissedByThoseWhoCome) {
  const std::string key = join_key("restart 3", "group");
  drop(ask(arrival(1, 3, key)));
  EXPECT_EQ(status(ask(gather(key, 0, 3))).ranks(), std::vector<int>{1});
  // It comes back: all begin anew.
  ask(arrival(1, 3, key));
  std::vector<StoreTable::Ticket> again;
  for (const int rank : {0, 1, 2}) again.push_back(ask(gather(key, rank, 3)));
  for (const auto each : again) EXPECT_TRUE(status(each).ok()) << status(each).message();
}

// spec: B1 between joining and the first meeting of the job nobody is missed too late
TEST_F(TableTest, ArrivalsBelongToTheJobOnceAllHaveJoined) {
  const std::string key = join_key("", "group/of mine");
  EXPECT_EQ(replies.at(ask({.op = StoreOp::count_joins})).number, 0);
  std::vector<StoreTable::Ticket> arrived;
  for (int rank = 0; rank < 3; ++rank) arrived.push_back(ask(arrival(rank, 3, key)));
  for (int rank = 0; rank < 3; ++rank) ask(gather(key, rank, 3));
  EXPECT_EQ(replies.at(ask({.op = StoreOp::count_joins})).number, 1);
  const std::string job = job_of(key, "valuevaluevalue");
  EXPECT_TRUE(job.starts_with("group/of mine-")) << job;
  const auto waiting = ask(gather(job + "/contacts", 0, 3));
  drop(arrived[2]);
  EXPECT_EQ(status(waiting).ranks(), std::vector<int>{2});
  EXPECT_EQ(status(ask(gather(job + "/contacts", 1, 3))).ranks(), std::vector<int>{2});
}

// spec: C14 all_gather under one key, many times, in any order of arrival
TEST_F(TableTest, GatherAgainAndAgain) {
  for (int round = 0; round < 100; ++round) {
    std::vector<StoreTable::Ticket> members;
    for (int i = 0; i < 5; ++i) members.push_back(ask(gather("key", (i * 2 + round) % 5, 5)));
    for (const auto member : members) EXPECT_TRUE(status(member).ok());
  }
  EXPECT_EQ(table.parked(), 0u);
}

// The value in a reader's reply must not change under it.
// spec: C14 append leaves values of earlier replies as they were
TEST_F(TableTest, AppendCopiesWhatIsShared) {
  ask(set("key"));
  const auto get = ask({.op = StoreOp::get, .keys = {"key"}});
  ask({.op = StoreOp::append, .keys = {"key"}, .values = {"+more"}});
  EXPECT_EQ(*replies.at(get).values[0], "value");
  EXPECT_EQ(*replies.at(ask({.op = StoreOp::get, .keys = {"key"}})).values[0], "value+more");
}

// spec: H2 at info the store's host says for whom an initialisation waits: after ten seconds, after
// twenty, and then no more
TEST_F(TableTest, MeetingsThatWaitForLongAreTold) {
  EXPECT_EQ(table.next_overdue(), TimePoint::max());
  const auto begin = now;
  ask(gather("join", 0, 4, seconds(300)));
  advance(seconds(2));
  ask(gather("join", 2, 4, seconds(300)));
  EXPECT_EQ(table.next_overdue(), begin + seconds(10));
  advance(seconds(7));
  EXPECT_TRUE(table.overdue(now).empty());
  advance(seconds(1));
  const auto said = table.overdue(now);
  ASSERT_EQ(said.size(), 1U);
  EXPECT_EQ(said[0], "the store has waited 10 s for members 1 and 3 of 4, in all_gather(\"join\")");
  EXPECT_TRUE(table.overdue(now).empty());
  EXPECT_EQ(table.next_overdue(), begin + seconds(20));
  ask(gather("join", 1, 4, seconds(300)));
  advance(seconds(10));
  ASSERT_EQ(table.overdue(now).size(), 1U);
  ask(gather("join", 3, 4, seconds(300)));
  EXPECT_EQ(table.next_overdue(), TimePoint::max());
}

}  // namespace
}  // namespace muster::store
