// SPDX-License-Identifier: BSD-3-Clause
// Small jobs are played in every order of events (testing/rref_job.h), and single rules one by one.
// Larger jobs: rref_seeds_test.cc.
#include "rpc/rref/rref_protocol.h"

#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "rpc/testing/rref_job.h"
#include "testing/budget.h"
#include "testing/fuzz.h"

namespace muster::rpc {
namespace {

using namespace rref_test;

using TimeLimit = std::chrono::duration<double>;

/// Plays each scenario for at most `limit`; says how many were played to their end.
std::size_t play_all_scenarios(Budget budget, TimeLimit limit) {
  std::size_t states = 0, whole = 0;
  for (const Scenario& scenario : scenarios()) {
    const Played played = play_all(scenario, budget, limit);
    EXPECT_EQ(played.trouble, "") << played.states << " states";
    states += played.states;
    whole += static_cast<std::size_t>(played.whole);
  }
  std::cout << states << " states; " << whole << " of " << scenarios().size()
            << " scenarios whole\n";
  return whole;
}

/// Faults make millions of states: an ordinary run samples each scenario, a long one plays a minute
/// of it, or all where there are fewer.
TimeLimit sample() { return muster::testing::test_budget(0.1, 60); }

// spec: N7 global reference counting: every order of deliveries, for two and three workers
TEST(RRefProtocol, EveryOrder) {
  // Some thousands of states: every run plays them all, however long a busy machine takes.
  EXPECT_EQ(play_all_scenarios({}, TimeLimit(muster::testing::kNoLimit)), scenarios().size());
}

// spec: N7 global reference counting: every order, with messages delivered twice
TEST(RRefProtocol, EveryOrderWithDuplicates) { play_all_scenarios({.duplicates = 2}, sample()); }

// spec: N7 global reference counting: every order, where a call fails that had arrived, arrives
// later, or never
TEST(RRefProtocol, EveryOrderWithFailedCalls) {
  play_all_scenarios({.duplicates = 1, .losses = 1}, sample());
}

// spec: N7 global reference counting: every order, where the owner, a user or a parent dies at any
// point
TEST(RRefProtocol, EveryOrderWithADeath) { play_all_scenarios({.deaths = 1}, sample()); }

// spec: N7 global reference counting: every order, with a death, a failed call and a second
// delivery
TEST(RRefProtocol, EveryOrderWithAllFaults) {
  play_all_scenarios({.duplicates = 1, .losses = 1, .deaths = 1}, sample());
}

// ---- single rules ----

RRefMessage only(const RRefEffects& effects) {
  EXPECT_EQ(effects.send.size(), 1U);
  return effects.send.empty() ? RRefMessage() : effects.send.front();
}

// spec: N7 confirmed_by_owner: false until the owner has answered, true on the owner always
TEST(RRefProtocol, ConfirmedByOwner) {
  RRefLedger caller(0), owner(1);
  const auto made = caller.create_at(1);
  ASSERT_TRUE(made.ok());
  EXPECT_FALSE(caller.confirmed(made->reference));
  const auto received = owner.receive(made->message);
  ASSERT_TRUE(received.ok() && received->has_value());
  EXPECT_TRUE(owner.confirmed((*received)->reference));
  const RRefMessage confirm = only(owner.take_effects());
  EXPECT_TRUE(caller.receive(confirm).ok());
  EXPECT_TRUE(caller.confirmed(made->reference));
  EXPECT_EQ(caller.take_effects().confirmed.size(), 1U);
}

// spec: N7 the owner's death fails what refers to it by name, and later uses of it
TEST(RRefProtocol, TheOwnersDeathIsNamed) {
  RRefLedger caller(0);
  const auto made = caller.create_at(1);
  ASSERT_TRUE(made.ok());
  caller.worker_died(1, Status(Code::peer_failed, "worker 'ps' (rank 1) died", {1}));
  const RRefEffects effects = caller.take_effects();
  ASSERT_EQ(effects.failed.size(), 1U);
  EXPECT_NE(effects.failed[0].second.message().find("'ps'"), std::string::npos);
  EXPECT_TRUE(effects.send.empty());
  EXPECT_FALSE(caller.fork(made->reference, 2).ok());
  EXPECT_FALSE(caller.create_at(1).ok());
  caller.drop(made->reference);
  EXPECT_TRUE(caller.empty());
}

// spec: N4 graceful shutdown names the worker it waits for: those whose references keep values
// alive
TEST(RRefProtocol, SaysWhomItWaitsFor) {
  RRefLedger owner(1), user(2);
  const RRefReference value = owner.create_here();
  const auto passed = owner.fork(value, 2);
  owner.drop(value);
  EXPECT_EQ(owner.waiting_for(), std::set<std::int32_t>{2});
  ASSERT_TRUE(user.receive(*passed).ok());
  user.drop_forks();
  EXPECT_TRUE(owner.receive(only(user.take_effects())).ok());
  EXPECT_EQ(owner.take_effects().drop.size(), 1U);
  EXPECT_TRUE(owner.waiting_for().empty());
}

// spec: N4 graceful shutdown drains references that were passed on in an answer that nobody read
TEST(RRefProtocol, AnswersThatNobodyRead) {
  RRefLedger owner(0), user(1), other(2);
  const auto given = owner.fork(owner.create_here(), 1);
  const auto held = user.receive(*given);
  ASSERT_TRUE(user.fork((*held)->reference, 2).ok());  // never comes
  user.drop_forks();
  EXPECT_FALSE(user.forks_settled());
  user.withdraw_passed_on();
  const RRefMessage withdrawal = only(user.take_effects());
  ASSERT_TRUE(other.receive(withdrawal).ok());
  user.acknowledged(2, withdrawal.number);
  ASSERT_TRUE(user.receive(only(other.take_effects())).ok());
  const RRefMessage release = only(user.take_effects());
  EXPECT_EQ(release.kind, RRefMessageKind::release);
  user.acknowledged(0, release.number);
  EXPECT_TRUE(user.forks_settled());
  user.withdraw_passed_on();
  EXPECT_TRUE(user.take_effects().send.empty());
}

// spec: N7 messages that make no sense are refused and change nothing
TEST(RRefProtocol, RefusesNonsense) {
  RRefLedger owner(1);
  const RRefReference value = owner.create_here();
  const auto good = owner.fork(value, 2);
  ASSERT_TRUE(good.ok());
  owner.take_effects();
  const std::string before = owner.text();
  RRefMessage release;
  release.from = 2;
  release.to = 1;
  release.number = 1;
  release.kind = RRefMessageKind::release;
  release.rref = value.rref;
  release.fork = good->fork;
  for (auto spoil :
       {+[](RRefMessage& m) { m.to = 3; }, +[](RRefMessage& m) { m.number = 0; },
        +[](RRefMessage& m) { m.fork.holder = 3; }, +[](RRefMessage& m) { m.rref.owner = 2; },
        +[](RRefMessage& m) {
          m.kind = RRefMessageKind::withdraw, m.withdrawn = RRefMessageKind::release;
        },
        +[](RRefMessage& m) { m.kind = RRefMessageKind::create; }}) {
    RRefMessage spoiled = release;
    spoil(spoiled);
    const auto answer = owner.receive(spoiled);
    EXPECT_EQ(answer.status().code(), Code::refused);
    EXPECT_EQ(owner.text(), before);
  }
  EXPECT_TRUE(owner.receive(release).ok());

  const std::string bytes = encode(release);
  EXPECT_EQ(*decode_rref_message(bytes), release);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode_rref_message(bytes.substr(0, length)).ok());
  EXPECT_FALSE(decode_rref_message(bytes + "x").ok());
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(0xee);
    if (const auto decoded = decode_rref_message(changed); decoded.ok()) {
      RRefLedger(1).receive(*decoded).ok() ? void() : void();  // any answer, but no crash
    }
  }
}

// spec: N7 messages of a worker that has lost its mind are refused, or taken as some other message;
// the ledger stays sound
TEST(RRefProtocolFuzz, DamagedMessagesAreRefusedOrHarmless) {
  muster::testing::Fuzz fuzz(11);
  int refused = 0, taken = 0;
  muster::testing::fuzz_for_a_while(2000, [&] {
    RRefLedger owner(1);
    const RRefReference value = owner.create_here();
    const auto passed = owner.fork(value, 2);
    ASSERT_TRUE(passed.ok());
    std::vector<RRefReference> held{value};
    for (int i = 0; i < 5; ++i) {
      RRefMessage good;
      good.from = 2;
      good.to = 1;
      good.number = 1 + fuzz.below(9);
      good.kind = static_cast<RRefMessageKind>(fuzz.below(kRRefMessageKinds));
      good.rref = fuzz.one_in(2) ? value.rref : RRefId{2, 1, 1 + fuzz.below(4)};
      good.fork = fuzz.one_in(2)
                      ? passed->fork
                      : ForkId{static_cast<std::int32_t>(fuzz.below(3)), 2, 1 + fuzz.below(4)};
      good.withdrawn = fuzz.one_in(2) ? RRefMessageKind::create : RRefMessageKind::fork;
      good.withdrawn_number = fuzz.below(9);
      good.reason = fuzz.noise(20);
      const std::string bytes = fuzz.one_in(3) ? encode(good) : fuzz.damaged(encode(good));
      const auto message = decode_rref_message(bytes);
      // The link tells the sender: a message that names another one comes no further.
      if (!message.ok() || message->from != 2) {
        ++refused;
        continue;
      }
      EXPECT_EQ(encode(*message), bytes);  // what is taken is what was said, to the last byte
      EXPECT_LE(message->reason.size(), bytes.size());
      const std::string before = owner.text();
      if (const auto received = owner.receive(*message); received.ok()) {
        ++taken;
        if (*received) held.push_back((*received)->reference);
      } else {
        EXPECT_EQ(owner.text(), before);
      }
      for (const RRefId& dropped : owner.take_effects().drop)
        EXPECT_NE(dropped, value.rref);  // this worker holds it itself
    }
    EXPECT_TRUE(owner.state(value).ok());
    owner.worker_died(2, Status(Code::peer_failed, "worker 2 died", {2}));
    for (const RRefReference& reference : held) owner.drop(reference);
    EXPECT_EQ(owner.owned(), 0U) << owner.text();
  });
  EXPECT_GT(refused, 0);
  EXPECT_GT(taken, 0);
}

// Memory stays flat: thousands of references leave nothing behind.
TEST(RRefProtocol, NothingGrows) {
  RRefLedger caller(0), owner(1);
  std::string after_some;
  for (int round = 0; round < 20'000; ++round) {
    auto made = caller.create_at(1);
    auto received = owner.receive(made->message);
    owner.drop((*received)->reference);
    caller.drop(made->reference);
    for (int hop = 0; hop < 3; ++hop) {
      for (const RRefMessage& message : owner.take_effects().send) {
        ASSERT_TRUE(caller.receive(message).ok());
        owner.acknowledged(0, message.number);
      }
      for (const RRefMessage& message : caller.take_effects().send) {
        ASSERT_TRUE(owner.receive(message).ok());
        caller.acknowledged(1, message.number);
      }
    }
  }
  EXPECT_TRUE(caller.empty());
  EXPECT_TRUE(owner.empty());
  EXPECT_LT(caller.text().size() + owner.text().size(), 400U);
}

}  // namespace
}  // namespace muster::rpc
