// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/join_door.h"

#include <gtest/gtest.h>

#include <string>

#include "testing/limits.h"

namespace muster::launch {
namespace {

JoinFacts some_facts() {
  return {Secret::given("the key of a job, for tests"), {"10.0.0.1", 29400}, "job7", {2, 4}};
}

Result<std::shared_ptr<JoinDoor>> open_door(const JoinFacts& facts) {
  return JoinDoor::open("127.0.0.1", facts,
                        deadline_after(steady_clock(), muster::testing::kMustHappen));
}

// spec: V5.join a token has an address of either family, and any change of a character is seen
TEST(JoinToken, ComesBackFromItsText) {
  for (const char* host : {"node0.example.org", "10.0.0.1", "fe80::1"}) {
    const JoinToken token{{host, 4711}, "0123456789abcdef0123456789abcdef"};
    const std::string text = token.text();
    const auto parsed = parse_join_token(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(parsed->door.host, host);
    EXPECT_EQ(parsed->door.port, 4711);
    EXPECT_EQ(parsed->key, token.key);
    for (std::size_t at = 0; at < text.size(); ++at) {
      std::string changed = text;
      changed[at] = changed[at] == '3' ? '4' : '3';
      const auto refused = parse_join_token(changed);
      ASSERT_FALSE(refused.ok()) << changed;
      EXPECT_EQ(refused.status().message().find(token.key.substr(8)), std::string::npos)
          << "an error does not show the key";
    }
    for (std::size_t size = 0; size < text.size(); ++size)
      EXPECT_FALSE(parse_join_token(text.substr(0, size)).ok()) << size;
  }
}

// spec: V5.refusal what a node is told is whole, or refused
TEST(JoinFacts, CutAtEveryByte) {
  const std::string record = encode(some_facts());
  for (std::size_t size = 0; size < record.size(); ++size)
    EXPECT_FALSE(parse_join_facts(record.substr(0, size)).ok()) << size;
  EXPECT_FALSE(parse_join_facts(record + "x").ok());
  const auto facts = parse_join_facts(record);
  ASSERT_TRUE(facts.ok());
  EXPECT_EQ(facts->nodes.least, 2);
  EXPECT_EQ(facts->nodes.most, 4);
}

// spec: V5.join who has the token learns where the nodes meet and the job's secret
TEST(JoinDoor, TellsWhoHasTheToken) {
  const auto door = open_door(some_facts());
  ASSERT_TRUE(door.ok()) << door.status().message();
  const auto facts =
      ask_at_door(*parse_join_token((*door)->token().text()), muster::testing::kMustHappen);
  ASSERT_TRUE(facts.ok()) << facts.status().message();
  EXPECT_EQ(facts->secret->key().text(), "the key of a job, for tests");
  EXPECT_EQ(facts->store.host, "10.0.0.1");
  EXPECT_EQ(facts->store.port, 29400);
  EXPECT_EQ(facts->run_id, "job7");
}

// spec: V5.join a secret that a user gave is not told
TEST(JoinDoor, WithoutASecret) {
  JoinFacts given = some_facts();
  given.secret.reset();
  const auto door = open_door(given);
  ASSERT_TRUE(door.ok()) << door.status().message();
  EXPECT_FALSE(ask_at_door((*door)->token(), muster::testing::kMustHappen)->secret.has_value());
}

// spec: V5.refusal another key opens nothing
TEST(JoinDoor, RefusesAnotherKey) {
  const auto door = open_door(some_facts());
  ASSERT_TRUE(door.ok()) << door.status().message();
  JoinToken other = (*door)->token();
  other.key = random_name(16);
  const auto refused = ask_at_door(other, muster::testing::kMustHappen);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::refused) << refused.status().message();
}

// spec: V5.refusal a token opens nothing once the door is closed
TEST(JoinDoor, OpensNothingOnceItIsClosed) {
  auto door = open_door(some_facts());
  ASSERT_TRUE(door.ok()) << door.status().message();
  const JoinToken token = (*door)->token();
  door->reset();
  const auto refused = ask_at_door(token, std::chrono::milliseconds(1));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("once all of its nodes have come"), std::string::npos)
      << refused.status().message();
}

}  // namespace
}  // namespace muster::launch
