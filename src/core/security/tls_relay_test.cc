// SPDX-License-Identifier: BSD-3-Clause
// A man in the middle who has no key, on the way of two sessions of every role: he passes on,
// changes, cuts, repeats, reorders, and gives the one session what the other has said.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/security/tls_session.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster {
namespace {

using Role = Handshake::Role;
using Side = TlsSession::Side;

const Secret kRelaySecret = Secret::given("the secret of the tests of relays");
constexpr std::array kRoles{Role::store, Role::link, Role::rpc, Role::launcher, Role::observer};

enum class Trick { forward, flip, cut, repeat, reorder, splice };
constexpr int kTricks = 6;

std::string name_of(Trick trick) {
  constexpr std::array names{"forward", "flip", "cut", "repeat", "reorder", "splice"};
  return names[static_cast<std::size_t>(trick)];
}

/// One direction of a session, and what of it has been sent, and read.
struct OneWay {
  TlsSession& from;
  TlsSession& to;
  std::string sent, read;

  void say(std::string_view text) {
    if (!from.done()) return;
    const ConstBytes piece = as_bytes(text);
    const auto taken = from.write({&piece, 1});
    if (taken.ok()) sent += text.substr(0, *taken);
  }
  void hear() {
    if (!to.done()) return;
    std::string some(64 * 1024, '\0');
    const MutableBytes piece(reinterpret_cast<std::byte*>(some.data()), some.size());
    if (const auto got = to.read({&piece, 1}); got.ok()) read += some.substr(0, *got);
  }
};

struct TwoSides {
  TwoSides(Role role, std::int32_t rank)
      : connector(Side::connector, hello(role, rank), kRelaySecret),
        acceptor(Side::acceptor, hello(role, rank + 1), kRelaySecret) {}
  static Handshake::Hello hello(Role role, std::int32_t rank) {
    Handshake::Hello hello{.role = role, .rank = rank, .world_size = 8, .job = "job", .build = 1};
    return hello;
  }
  bool done() const { return connector.done() && acceptor.done(); }
  bool failed() const { return connector.failed() || acceptor.failed(); }

  TlsSession connector, acceptor;
  std::array<OneWay, 2> ways{OneWay{connector, acceptor, {}, {}},
                             OneWay{acceptor, connector, {}, {}}};
};

/// Passes on the chunks of one direction, or plays a trick on them with those of another session.
class Middleman {
 public:
  Middleman(Trick trick, std::size_t when, std::mt19937_64& random)
      : trick_(trick), when_(when), random_(random) {}

  std::string pass(std::string chunk, const std::string& others) {
    if (chunk.empty()) return chunk;
    if (!held_.empty()) return chunk + std::exchange(held_, {});
    if (seen_++ != when_) {
      before_ = chunk;
      return chunk;
    }
    std::string passed = chunk;
    const std::size_t at = random_() % chunk.size();
    switch (trick_) {
      case Trick::forward: break;
      case Trick::flip: passed[at] = static_cast<char>(passed[at] ^ (1 << random_() % 8)); break;
      case Trick::cut:
        passed.erase(random_() % 2 == 0 ? 0 : at, random_() % 2 == 0 ? 1 : std::string::npos);
        break;
      case Trick::repeat: passed += random_() % 2 == 0 ? chunk : before_; break;
      case Trick::reorder: held_ = std::exchange(passed, {}); break;
      case Trick::splice: passed = others; break;
    }
    changed = passed != chunk;
    // The version in the header of a record that is not encrypted means nothing.
    may_be_ignored = trick_ == Trick::flip && seen_ <= 3;
    return passed;
  }

  bool changed = false;
  bool may_be_ignored = false;

 private:
  const Trick trick_;
  const std::size_t when_;
  std::mt19937_64& random_;
  std::size_t seen_ = 0;
  std::string before_, held_;
};

std::string random_text(std::mt19937_64& random) {
  std::string text(1 + random() % (random() % 3 == 0 ? 20'000 : 200), '\0');
  for (char& each : text) each = static_cast<char>(random());
  return text;
}

void attack(Trick trick, Role role, std::mt19937_64& random, int& ignored) {
  constexpr std::size_t kRounds = 10;
  TwoSides session(role, 2), other(role, 4);
  const std::size_t way = random() % 2;
  Middleman relay(trick, random() % 6, random);
  std::array<std::string, 2> mine, others;
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (std::size_t each = 0; each < 2; ++each) {
      others[each] = other.ways[each].from.take_output();
      other.ways[each].to.feed(as_bytes(others[each]));
      const std::string chunk = session.ways[each].from.take_output();
      session.ways[each].to.feed(as_bytes(each == way ? relay.pass(chunk, others[each]) : chunk));
      for (TwoSides* both : {&session, &other}) {
        both->ways[each].hear();
        both->ways[each].say(random_text(random));
      }
    }
  }
  // Nothing is read but what was said, in order, to its end.
  for (const OneWay& each : session.ways)
    ASSERT_TRUE(std::string_view(each.sent).starts_with(each.read));
  ASSERT_TRUE(other.done() && !other.failed());
  if (!relay.changed) {
    ASSERT_TRUE(session.done() && !session.failed()) << session.connector.failure().message();
    return;
  }
  // A record that was cut may still wait for its end.
  const bool all_read = session.ways[way].read == session.ways[way].sent;
  if (session.done() && !session.failed() && all_read) {
    ASSERT_TRUE(relay.may_be_ignored);
    ++ignored;
  }
  for (const TlsSession* side : {&session.connector, &session.acceptor}) {
    if (!side->failed() || side->verdict() != TlsSession::Verdict::accepted) continue;
    EXPECT_NE(side->failure().message().find("tampers"), std::string::npos)
        << side->failure().message();
  }
}

class TlsRelay : public ::testing::TestWithParam<Role> {};
std::string role_name(const ::testing::TestParamInfo<Role>& role) {
  constexpr std::array names{"", "store", "link", "", "", "rpc", "launcher", "observer"};
  return names[static_cast<std::size_t>(role.param)];
}
INSTANTIATE_TEST_SUITE_P(Roles, TlsRelay, ::testing::ValuesIn(kRoles), role_name);

// spec: W1.relay a relay that replays, alters, cuts, reorders or splices is refused, in every role
TEST_P(TlsRelay, NothingIsAcceptedThatWasTamperedWith) {
  std::mt19937_64 random(testing::test_seed() + static_cast<std::uint64_t>(GetParam()));
  int ignored = 0;
  const int tries = testing::test_rounds(300, 10'000);
  for (int attempt = 0; attempt < tries; ++attempt) {
    const auto trick = static_cast<Trick>(random() % kTricks);
    SCOPED_TRACE(name_of(trick) + " in attempt " + std::to_string(attempt) +
                 "; replay with MUSTER_TEST_SEED=" + std::to_string(testing::test_seed()));
    attack(trick, GetParam(), random, ignored);
    if (HasFatalFailure()) return;
  }
  EXPECT_LE(ignored, tries / 50);
}

// A server of one role refuses the keys of any other.
TEST(TlsRelayBetweenRoles, KeysOfOneRoleOpenNoOther) {
  for (const Role asked : kRoles) {
    for (const Role served : kRoles) {
      TlsSession connector(Side::connector, TwoSides::hello(asked, 2), kRelaySecret);
      TlsSession acceptor(Side::acceptor, TwoSides::hello(served, 3), kRelaySecret);
      std::string first = connector.take_output();
      first[10] = static_cast<char>(served);  // the role, as the greeting says it
      acceptor.feed(as_bytes(first));
      std::string answer = acceptor.take_output();
      answer[10] = static_cast<char>(asked);
      connector.feed(as_bytes(answer));
      for (int i = 0; i < 3; ++i) {
        acceptor.feed(as_bytes(connector.take_output()));
        connector.feed(as_bytes(acceptor.take_output()));
      }
      EXPECT_EQ(acceptor.done(), asked == served);
      EXPECT_EQ(connector.done(), asked == served);
    }
  }
}

/// `job`'s hash, as greetings hold it.
std::string hash_of(const std::string& job) { return std::string(as_text(short_hash(job))); }

// Two jobs with one secret. The relay leads a connector of one to an acceptor of the other, and
// makes each greeting say the job that its reader expects.
// spec: W1 a relay cannot swap the connections of two jobs with one secret, in any role
TEST_P(TlsRelay, JobsWithOneSecretAreNotSwapped) {
  constexpr std::size_t kJobAt = 24;
  for (const bool rewrites : {false, true}) {
    auto near = TwoSides::hello(GetParam(), 2);
    auto far = TwoSides::hello(GetParam(), 3);
    near.job = "this job";
    far.job = "that job";
    TlsSession connector(Side::connector, near, kRelaySecret);
    TlsSession acceptor(Side::acceptor, far, kRelaySecret);
    std::string first = connector.take_output();
    ASSERT_EQ(first.substr(kJobAt, 16), hash_of(near.job));
    if (rewrites) first.replace(kJobAt, 16, hash_of(far.job));
    acceptor.feed(as_bytes(first));
    std::string answer = acceptor.take_output();
    ASSERT_EQ(answer.substr(kJobAt, 16), hash_of(far.job));
    if (rewrites) answer.replace(kJobAt, 16, hash_of(near.job));
    connector.feed(as_bytes(answer));
    acceptor.feed(as_bytes(connector.take_output()));
    EXPECT_FALSE(connector.done());
    EXPECT_FALSE(acceptor.done());
    EXPECT_TRUE(acceptor.failed());
    EXPECT_EQ(acceptor.verdict(),
              rewrites ? TlsSession::Verdict::bad_proof : TlsSession::Verdict::bad_job);
  }
}

// spec: W1 what ranks say of themselves is bound in: a relay cannot pass one rank off as another
TEST_P(TlsRelay, RanksAndLivesAreNotSwapped) {
  constexpr std::size_t kRankAt = 12, kNoteAt = 48;
  for (const std::size_t at : {kRankAt, kNoteAt}) {
    TwoSides session(GetParam(), 2);
    std::string first = session.connector.take_output();
    first[at] = static_cast<char>(first[at] ^ 1);
    session.acceptor.feed(as_bytes(first));
    for (int i = 0; i < 3; ++i) {
      session.connector.feed(as_bytes(session.acceptor.take_output()));
      session.acceptor.feed(as_bytes(session.connector.take_output()));
    }
    EXPECT_FALSE(session.acceptor.done());
    EXPECT_FALSE(session.connector.done());
  }
}

// spec: W1 the observers' key opens connections of observers and no others
TEST(TlsRelayBetweenRoles, ObserversKeysOpenNoOtherRole) {
  const Secret observer = kRelaySecret.observer();
  for (const Role role : kRoles) {
    TlsSession connector(Side::connector, TwoSides::hello(role, 2), observer);
    TlsSession acceptor(Side::acceptor, TwoSides::hello(role, 3), kRelaySecret);
    for (int i = 0; i < 4; ++i) {
      acceptor.feed(as_bytes(connector.take_output()));
      connector.feed(as_bytes(acceptor.take_output()));
    }
    EXPECT_EQ(connector.done() && acceptor.done(), role == Role::observer);
  }
}

TEST(TlsRelayBetweenRoles, ServedRolesAnswerAsAsked) {
  auto store = TwoSides::hello(Role::store, 3);
  store.also = {{Role::launcher, "job"}, {Role::observer, "job"}};
  for (const Role asked : {Role::store, Role::launcher, Role::observer, Role::link}) {
    TlsSession connector(Side::connector, TwoSides::hello(asked, 2), kRelaySecret);
    TlsSession acceptor(Side::acceptor, store, kRelaySecret);
    for (int i = 0; i < 4; ++i) {
      acceptor.feed(as_bytes(connector.take_output()));
      connector.feed(as_bytes(acceptor.take_output()));
    }
    EXPECT_EQ(connector.done(), asked != Role::link) << connector.failure().message();
  }
}

}  // namespace
}  // namespace muster
