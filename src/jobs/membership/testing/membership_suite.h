// SPDX-License-Identifier: BSD-3-Clause
/// The tests that every kind of membership must pass. A kind (`membership_kinds.h`) joins by one
/// line:
///
///   INSTANTIATE_TYPED_TEST_SUITE_P(Agent, MembershipSuite, AgentKind);
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "jobs/membership/membership.h"
#include "jobs/membership/testing/bystander.h"
#include "testing/limits.h"
#include "testing/seed.h"

namespace muster::membership::testing {

constexpr Duration kPatience = muster::testing::kMustHappen;

/// A watch with everything that it has told.
class Watcher {
 public:
  explicit Watcher(std::unique_ptr<Watch> watch) : watch_(std::move(watch)) {}

  /// Until `holds` does, or the patience is at its end.
  bool until(const std::function<bool()>& holds) {
    const TimePoint deadline = steady_clock().now() + kPatience;
    while (!holds()) {
      const Duration left = deadline - steady_clock().now();
      if (left <= Duration::zero()) return false;
      if (!step(left)) return false;
    }
    return true;
  }
  bool step(Duration timeout) {
    auto update = watch_->next(timeout);
    if (!update) {
      ADD_FAILURE() << update.status().message();
      return false;
    }
    EXPECT_GE(update->revision, revision);
    revision = update->revision;
    if (update->snapshot) names.clear();
    for (const Change& change : update->changes) {
      if (!change.value) {
        names.erase(change.name);
      } else {
        names[change.name] = change;
      }
    }
    if (update->epoch) {
      EXPECT_GT(update->epoch->number, epoch.number);
      epoch = *update->epoch;
      epoch_revision = update->epoch_revision;
    }
    return true;
  }
  bool sees(const std::string& name, const std::string& value) {
    return until([&] { return names.contains(name) && names[name].value == value; });
  }
  bool misses(const std::string& name) {
    return until([&] { return revision > 0 && !names.contains(name); });
  }

  std::map<std::string, Change> names;
  Epoch epoch;
  std::int64_t revision = 0, epoch_revision = 0;

 private:
  std::unique_ptr<Watch> watch_;
};

/// Tests of one kind alone, skipped where its server is not installed.
template <class Server>
class ServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Server::installed()) GTEST_SKIP() << Server::kMissing;
  }
  static Epoch epoch(std::int64_t number) {
    Epoch epoch{number, JobState::running, 0, 0, "a test", {}};
    epoch.members.push_back({0, "node/a", "its value"});
    return epoch;
  }
  /// `outsider` has not the job's secret: what it holds is not told, and what it commits ends the
  /// watches of the job's members with an error.
  /// `told_changes`: of both holds; a kind may tell that a name is there whose value it refuses.
  static void expect_no_say(Membership& outsider, Membership& member, std::size_t told_changes) {
    const auto theirs = outsider.hold("node/b", "5 workers", std::chrono::seconds(10));
    ASSERT_TRUE(theirs.ok()) << theirs.status().message();
    const auto ours = member.hold("node/a", "1 worker", std::chrono::seconds(10));
    ASSERT_TRUE(ours.ok()) << ours.status().message();
    auto watch = member.watch("");
    ASSERT_TRUE(watch.ok());
    const auto all = (*watch)->next(kPatience);
    ASSERT_TRUE(all.ok()) << all.status().message();
    EXPECT_EQ(all->changes.size(), told_changes);
    std::vector<std::string> told;
    for (const Change& change : all->changes)
      if (change.value) told.push_back(change.name);
    EXPECT_EQ(told, std::vector<std::string>{"node/a"});
    const auto first = outsider.commit(epoch(1), 0);
    ASSERT_TRUE(first.ok()) << first.status().message();
    Result<Update> update = Update();
    while (update.ok()) {
      EXPECT_FALSE(update->epoch.has_value());
      update = (*watch)->next(kPatience);
    }
    EXPECT_EQ(update.status().code(), Code::refused);
    EXPECT_NE(update.status().message().find("no proof of this job's secret"), std::string::npos);
    EXPECT_EQ(member.commit(epoch(2), *first).status().code(), Code::refused);
  }
};

template <class Kind>
class MembershipSuite : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Kind::missing(); !why.empty()) GTEST_SKIP() << why;
    kind_.emplace();
  }
  std::unique_ptr<Membership> open() { return kind_->open(); }
  Watcher watch(Membership& membership, const std::string& prefix = "") {
    auto watch = membership.watch(prefix);
    if (watch) return Watcher(std::move(*watch));
    ADD_FAILURE() << watch.status().message();
    std::abort();
  }
  std::unique_ptr<Hold> hold(Membership& membership, const std::string& name,
                             const std::string& value) {
    auto hold = membership.hold(name, value, kind_->ttl());
    if (hold) return std::move(*hold);
    ADD_FAILURE() << hold.status().message();
    return nullptr;
  }
  static Epoch epoch(std::int64_t number, const std::string& member = "node/a") {
    Epoch epoch{number, JobState::running, 0, 0, "a test", {}};
    epoch.members.push_back({0, member, "its value"});
    return epoch;
  }

  std::optional<Kind> kind_;
};
TYPED_TEST_SUITE_P(MembershipSuite);

// spec: L1 hold and watch: a name, its value, another value, its end
TYPED_TEST_P(MembershipSuite, AWatcherSeesAHoldBeginChangeAndEnd) {
  auto here = this->open(), there = this->open();
  auto early = this->hold(*here, "node/a", "first");
  ASSERT_NE(early, nullptr);
  Watcher watcher = this->watch(*there);
  EXPECT_TRUE(watcher.sees("node/a", "first"));
  auto late = this->hold(*here, "node/b", "");
  EXPECT_TRUE(watcher.sees("node/b", ""));
  const std::int64_t since = watcher.names["node/a"].since;
  EXPECT_TRUE(early->set("second").ok());
  EXPECT_TRUE(watcher.sees("node/a", "second"));
  EXPECT_EQ(watcher.names["node/a"].since, since);
  EXPECT_GT(watcher.names["node/b"].since, since);
  early.reset();
  EXPECT_TRUE(watcher.misses("node/a"));
  EXPECT_TRUE(watcher.names.contains("node/b"));
  EXPECT_TRUE(late->state().ok());
}

// spec: L1 watch: only names with the prefix
TYPED_TEST_P(MembershipSuite, AWatcherSeesOnlyItsPrefix) {
  auto membership = this->open();
  const auto other = this->hold(*membership, "other/a", "1");
  Watcher watcher = this->watch(*membership, "node/");
  const auto mine = this->hold(*membership, "node/a", "1");
  const auto another = this->hold(*membership, "other/b", "1");
  const auto last = this->hold(*membership, "node/b", "1");
  EXPECT_TRUE(watcher.sees("node/b", "1"));
  EXPECT_EQ(watcher.names.size(), 2u);
}

// spec: L1 hold: a name has one holder at a time, and another hold of it is told apart
TYPED_TEST_P(MembershipSuite, ANameIsHeldOnce) {
  auto here = this->open(), there = this->open();
  auto first = this->hold(*here, "node/a", "I was first");
  Watcher watcher = this->watch(*there);
  ASSERT_TRUE(watcher.sees("node/a", "I was first"));
  const std::int64_t since = watcher.names["node/a"].since;
  const auto second = there->hold("node/a", "I was second", this->kind_->ttl());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::refused) << second.status().message();
  EXPECT_NE(second.status().message().find("node/a"), std::string::npos)
      << second.status().message();
  first.reset();
  const auto third = this->hold(*there, "node/a", "I am third");
  EXPECT_TRUE(watcher.sees("node/a", "I am third"));
  EXPECT_GT(watcher.names["node/a"].since, since);
}

// spec: L1 hold: the name of a killed process is free again; others keep theirs
TYPED_TEST_P(MembershipSuite, AKilledHolderIsGone) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  auto here = this->open();
  std::unique_ptr<Membership> theirs;
  std::unique_ptr<Hold> hold;
  Bystander child([&] {
    theirs = this->kind_->open();
    hold = this->hold(*theirs, "node/dead", "1");
    return hold != nullptr;
  });
  const auto mine = this->hold(*here, "node/survivor", "1");
  ASSERT_TRUE(child.ready());
  Watcher watcher = this->watch(*here);
  ASSERT_TRUE(watcher.sees("node/dead", "1"));
  child.kill();
  EXPECT_TRUE(watcher.misses("node/dead"));
  EXPECT_TRUE(mine->state().ok());
  EXPECT_TRUE(watcher.names.contains("node/survivor"));
  EXPECT_NE(this->hold(*here, "node/dead", "2"), nullptr);
}

// spec: L1 hold: the name of a process that hangs is free after its time
TYPED_TEST_P(MembershipSuite, ASilentHolderIsGone) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  auto here = this->open();
  std::unique_ptr<Membership> theirs;
  std::unique_ptr<Hold> hold;
  Bystander child([&] {
    theirs = this->kind_->open();
    hold = this->hold(*theirs, "node/silent", "1");
    return hold != nullptr;
  });
  ASSERT_TRUE(child.ready());
  Watcher watcher = this->watch(*here);
  ASSERT_TRUE(watcher.sees("node/silent", "1"));
  child.stop();
  EXPECT_TRUE(watcher.misses("node/silent"));
  EXPECT_NE(this->hold(*here, "node/silent", "2"), nullptr);
  child.go_on();
}

// spec: L1 commit: of two that expect the same revision one wins, and all watchers learn which
TYPED_TEST_P(MembershipSuite, OneOfTwoCommitsWins) {
  auto here = this->open(), there = this->open();
  Watcher watcher = this->watch(*there);
  ASSERT_TRUE(watcher.step(kPatience));
  EXPECT_EQ(watcher.epoch.number, 0);
  Result<std::int64_t> results[2] = {Status(Code::internal, ""), Status(Code::internal, "")};
  std::thread first([&] { results[0] = here->commit(this->epoch(1, "node/x"), 0); });
  std::thread second([&] { results[1] = there->commit(this->epoch(1, "node/y"), 0); });
  first.join();
  second.join();
  ASSERT_NE(results[0].ok(), results[1].ok());
  const auto& winner = results[results[0].ok() ? 0 : 1];
  const auto& loser = results[results[0].ok() ? 1 : 0];
  EXPECT_EQ(loser.status().code(), Code::refused) << loser.status().message();
  ASSERT_TRUE(watcher.until([&] { return watcher.epoch.number == 1; }));
  EXPECT_EQ(watcher.epoch, this->epoch(1, results[0].ok() ? "node/x" : "node/y"));
  EXPECT_EQ(watcher.epoch_revision, *winner);
  const auto next = here->commit(this->epoch(2), *winner);
  ASSERT_TRUE(next.ok()) << next.status().message();
  EXPECT_GT(*next, *winner);
}

// spec: L5 a commit with an older epoch, or on top of an older one, is refused with both numbers
TYPED_TEST_P(MembershipSuite, OlderEpochsAreRefused) {
  auto membership = this->open();
  auto revision = membership->commit(this->epoch(6), 0);
  ASSERT_TRUE(revision.ok()) << revision.status().message();
  const std::int64_t old = *revision;
  revision = membership->commit(this->epoch(7), old);
  ASSERT_TRUE(revision.ok()) << revision.status().message();
  for (const auto& [number, expected] :
       {std::pair<std::int64_t, std::int64_t>{8, old}, {6, *revision}, {7, *revision}}) {
    const auto refused = membership->commit(this->epoch(number), expected);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::refused);
    const std::string& text = refused.status().message();
    EXPECT_NE(text.find("epoch 7"), std::string::npos) << text;
    EXPECT_NE(text.find("epoch " + std::to_string(number)), std::string::npos) << text;
  }
}

// spec: L1 watch: a watcher that comes late sees all names and the epoch
TYPED_TEST_P(MembershipSuite, ALateWatcherSeesEverything) {
  auto here = this->open();
  std::vector<std::unique_ptr<Hold>> holds;
  holds.reserve(20);
  for (int i = 0; i < 20; ++i)
    holds.push_back(this->hold(*here, "node/" + std::to_string(i), std::to_string(i * i)));
  const auto revision = here->commit(this->epoch(3), 0);
  ASSERT_TRUE(revision.ok()) << revision.status().message();
  for (int i = 0; i < 20; i += 2) holds[static_cast<std::size_t>(i)].reset();
  auto there = this->open();
  Watcher watcher = this->watch(*there);
  ASSERT_TRUE(
      watcher.until([&] { return watcher.epoch.number == 3 && watcher.names.size() == 10; }));
  EXPECT_EQ(watcher.epoch_revision, *revision);
  for (int i = 1; i < 20; i += 2)
    EXPECT_EQ(watcher.names["node/" + std::to_string(i)].value, std::to_string(i * i));
}

// spec: L14 hold: a process that stands still for longer than its lease, at any point of what its
// threads do, learns that it has lost its name, and the one that it takes then is renewed
TYPED_TEST_P(MembershipSuite, AHolderThatStandsStillHoldsAgain) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  const Duration ttl = this->kind_->ttl();
  const auto here = this->open();  // starts the server
  for (int attempt = 0; attempt < (muster::testing::long_tests() ? 8 : 1); ++attempt) {
    const std::string name = "node/" + std::to_string(attempt);
    std::unique_ptr<Membership> theirs;
    std::unique_ptr<Hold> hold;
    Bystander child([&] {
      theirs = this->kind_->open();
      hold = this->hold(*theirs, name, "first");
      if (hold == nullptr) return false;
      std::thread([&] {
        for (;;) {
          std::this_thread::sleep_until(std::max(hold->expires(), steady_clock().now() + ttl / 16));
          if (hold->state().code() != Code::refused) continue;
          auto again = theirs->hold(name, "again", ttl);
          if (again) hold = std::move(*again);
        }
      }).detach();
      return true;
    });
    std::unique_ptr<Membership> others;
    std::unique_ptr<Hold> silent;
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const Descriptor reading(ends[0]), writing(ends[1]);
    Bystander other([&] {
      std::thread([&] {
        char now = 0;
        if (::read(reading.get(), &now, 1) != 1) return;
        others = this->kind_->open();
        silent = this->hold(*others, "node/silent", "1");
      }).detach();
      return true;
    });
    ASSERT_TRUE(child.ready() && other.ready());
    Watcher watcher = this->watch(*here);
    ASSERT_TRUE(watcher.sees(name, "first"));
    std::this_thread::sleep_for(attempt * ttl / 32);  // the points of its loop
    child.stop();
    EXPECT_TRUE(watcher.misses(name));
    child.go_on();
    ASSERT_TRUE(watcher.sees(name, "again"));
    const std::int64_t since = watcher.names[name].since;
    // Another one that is silent for as long loses its name; this one does not.
    ASSERT_EQ(::write(writing.get(), "y", 1), 1);
    ASSERT_TRUE(watcher.sees("node/silent", "1"));
    other.stop();
    EXPECT_TRUE(watcher.misses("node/silent"));
    EXPECT_EQ(watcher.names[name].since, since);
  }
}

// spec: L14 watch: a process that stands still for longer than a lease learns that a hold ended and
// another began meanwhile
TYPED_TEST_P(MembershipSuite, AWatcherThatStandsStillMissesNoHold) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  auto here = this->open();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Descriptor reading(ends[0]);
  Descriptor writing(ends[1]);
  std::unique_ptr<Membership> theirs;
  std::optional<Watcher> watcher;
  Bystander child([&] {
    theirs = this->kind_->open();
    watcher.emplace(this->watch(*theirs));
    if (!watcher->sees("node/a", "first")) return false;
    std::thread([&, since = watcher->names["node/a"].since] {
      const bool told = watcher->sees("node/a", "third") && watcher->names["node/a"].since > since;
      [[maybe_unused]] const ssize_t written = ::write(writing.get(), told ? "y" : "n", 1);
    }).detach();
    return true;
  });
  writing.reset();  // the end of the child is the end of the pipe
  auto hold = this->hold(*here, "node/a", "first");
  ASSERT_TRUE(child.ready());
  child.stop();
  EXPECT_TRUE(hold->set("second").ok());
  hold.reset();
  hold = this->hold(*here, "node/a", "third");
  std::this_thread::sleep_for(2 * this->kind_->ttl());  // the fault itself
  child.go_on();
  char told = 'n';
  pollfd answer{reading.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&answer, 1, muster::testing::kMustHappenMs), 1);
  EXPECT_EQ(::read(reading.get(), &told, 1), 1);
  EXPECT_EQ(told, 'y');
}

// spec: L1 watch: close ends a wait from another thread
TYPED_TEST_P(MembershipSuite, CloseEndsAWait) {
  auto membership = this->open();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok()) << watch.status().message();
  ASSERT_TRUE((*watch)->next(kPatience).ok());
  std::thread closing([&] { (*watch)->close(); });
  const auto ended = (*watch)->next(Duration(-1));
  closing.join();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.status().code(), Code::aborted) << ended.status().message();
  EXPECT_EQ((*watch)->next(Duration(-1)).status().code(), Code::aborted);
}

// spec: L1 watch: nothing new within the timeout is no error
TYPED_TEST_P(MembershipSuite, NothingNewIsAnEmptyUpdate) {
  auto membership = this->open();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok()) << watch.status().message();
  const auto first = (*watch)->next(kPatience);
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_TRUE(first->snapshot);
  const auto nothing = (*watch)->next(std::chrono::milliseconds(20));
  ASSERT_TRUE(nothing.ok()) << nothing.status().message();
  EXPECT_FALSE(nothing->snapshot);
  EXPECT_TRUE(nothing->changes.empty());
  EXPECT_FALSE(nothing->epoch.has_value());
}

// spec: L1 any bytes are a value
TYPED_TEST_P(MembershipSuite, ValuesAreBytes) {
  auto membership = this->open();
  std::string bytes(70'000, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  const auto hold = this->hold(*membership, "node/\x01 \xff", bytes);
  Watcher watcher = this->watch(*membership);
  EXPECT_TRUE(watcher.sees("node/\x01 \xff", bytes));
  Epoch epoch = this->epoch(1);
  epoch.members[0].value = bytes;
  ASSERT_TRUE(membership->commit(epoch, 0).ok());
  ASSERT_TRUE(watcher.until([&] { return watcher.epoch.number == 1; }));
  EXPECT_EQ(watcher.epoch, epoch);
}

REGISTER_TYPED_TEST_SUITE_P(MembershipSuite, AWatcherSeesAHoldBeginChangeAndEnd,
                            AWatcherSeesOnlyItsPrefix, ANameIsHeldOnce, AKilledHolderIsGone,
                            ASilentHolderIsGone, OneOfTwoCommitsWins, OlderEpochsAreRefused,
                            ALateWatcherSeesEverything, AHolderThatStandsStillHoldsAgain,
                            AWatcherThatStandsStillMissesNoHold, CloseEndsAWait,
                            NothingNewIsAnEmptyUpdate, ValuesAreBytes);

}  // namespace muster::membership::testing
