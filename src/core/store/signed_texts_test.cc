// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/signed_texts.h"

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

#include "core/rendezvous/join.h"
#include "core/rendezvous/rendezvous.h"
#include "core/store/factory.h"
#include "testing/limits.h"

namespace muster::store {
namespace {

constexpr Duration kTextLimit = muster::testing::kMustHappen;
const Secret kTextSecret = Secret::given("the secret of the tests of texts");

SignedTexts texts(const std::string& job = "job", int world_size = 2) {
  return {kTextSecret, job, world_size};
}

TEST(SignedTexts, ComeBackAsTheyWereWritten) {
  const auto store = make_hash_store(kTextLimit);
  auto other = std::async(std::launch::async, [&] {
    return texts().all_gather(*store, "round", 1, "from rank 1", kTextLimit);
  });
  const auto all = texts().all_gather(*store, "round", 0, "from rank 0", kTextLimit);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_EQ(*all, (std::vector<std::string>{"from rank 0", "from rank 1"}));
  EXPECT_TRUE(other.get().ok());
}

/// Rank 0's verdict on `put` in the place of rank 1's text.
Status opened(const std::string& put) {
  const std::string mine = texts().sign("round", 0, "mine");
  return texts().open("round", 0, mine, {mine, put}).status();
}

// spec: W2 a text of another job, round, rank, world size or secret, or one that was changed, cut
// or replaced, is refused by name
TEST(SignedTexts, WhatSomebodyElseWroteIsRefusedByName) {
  EXPECT_TRUE(opened(texts().sign("round", 1, "theirs")).ok());
  std::string changed = texts().sign("round", 1, "theirs");
  changed.back() = 'x';
  const SignedTexts other_secret(Secret::given("quite another secret"), "job", 2);
  for (const std::string& put :
       {texts("another job").sign("round", 1, "theirs"), texts().sign("next", 1, "theirs"),
        texts().sign("round", 0, "theirs"), texts("job", 3).sign("round", 1, "theirs"),
        other_secret.sign("round", 1, "theirs"), changed, std::string("short"), std::string(),
        std::string(64, 'x')}) {
    const Status status = opened(put);
    EXPECT_EQ(status.code(), Code::refused) << put;
    EXPECT_EQ(status.ranks(), std::vector<int>{1});
    EXPECT_NE(status.message().find("somebody else writes"), std::string::npos);
  }
}

TEST(SignedTexts, OnesOwnTextIsMissed) {
  const std::string mine = texts().sign("round", 0, "mine");
  const std::string before = texts().sign("round", 0, "of another time");
  const Status status =
      texts().open("round", 0, mine, {before, texts().sign("round", 1, "theirs")}).status();
  EXPECT_EQ(status.code(), Code::refused);
  EXPECT_NE(status.message().find("something else"), std::string::npos);
}

// Somebody who has no secret takes a rank's place where ranks meet.
TEST(SignedTexts, WhoHasNoSecretCannotJoin) {
  const auto store = make_hash_store(kTextLimit);
  auto impostor = std::async(std::launch::async, [&] {
    return store->all_gather(join_key("", ""), 1, 2, "sixteen bytes or so, and no proof",
                             kTextLimit);
  });
  const auto joined = rendezvous_over(store, {.rank = 0, .world_size = 2, .timeout = kTextLimit});
  EXPECT_EQ(joined.status().code(), Code::refused) << joined.status().message();
  EXPECT_EQ(joined.status().ranks(), std::vector<int>{1});
  EXPECT_TRUE(impostor.get().ok());
}

}  // namespace
}  // namespace muster::store
