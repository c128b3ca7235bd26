// SPDX-License-Identifier: BSD-3-Clause
// Jobs of two nodes over every kind of membership, of which one launcher stands still for longer
// than its lease, at each point at which it waits or asks the service: while it joins the job, and
// while it comes back from another pause. It is a member again, and no commit is lost.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "jobs/launch/testing/launcher_process.h"
#include "jobs/launch/testing/pausing_membership.h"
#include "jobs/membership/testing/bystander.h"
#include "jobs/membership/testing/membership_kinds.h"
#include "testing/limits.h"
#include "testing/seed.h"

namespace muster::launch {
namespace {

using membership::testing::AgentKind;
using membership::testing::Bystander;
using membership::testing::EtcdKind;
using membership::testing::KubernetesKind;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct PauseCase {
  PausePoint point;
  bool returning = false;  ///< it counts after another pause; else from the beginning
  int paused = 0;          ///< the node, in the order in which they start
};

std::string name_of(const PauseCase& each) {
  return "node " + std::to_string(each.paused) + (each.returning ? " returning" : " joining") +
         (each.point.after ? ", after " : ", before ") + name_of(each.point.call) + " " +
         std::to_string(each.point.count);
}

/// Each point of a launcher's threads, so often as it is passed in a job of this size.
std::vector<PauseCase> all_cases() {
  struct Row {
    PausedCall call;
    bool returning;
    int times;
  };
  constexpr Row kRows[] = {
      {PausedCall::hold, false, 1},   {PausedCall::watch, false, 1},  {PausedCall::next, false, 3},
      {PausedCall::set, false, 2},    {PausedCall::commit, false, 2}, {PausedCall::next, true, 3},
      {PausedCall::release, true, 1}, {PausedCall::hold, true, 1},    {PausedCall::set, true, 2},
      {PausedCall::commit, true, 1},
  };
  std::vector<PauseCase> all;
  for (const Row& row : kRows) {
    for (int count = 1; count <= row.times; ++count) {
      for (const bool after : {false, true}) {
        for (const int node : {0, 1})
          all.push_back({{row.call, after, count}, row.returning, node});
      }
    }
  }
  return all;
}

/// A job of two launchers, one of which stands still once or twice.
template <class Kind>
class PausedLaunchers {
 public:
  explicit PausedLaunchers(PauseCase which)
      : which_(which), until_(steady_clock().now() + muster::testing::kMustHappen) {
    nodes_[0]->counts = nodes_[1]->counts = !which.returning;
  }

  /// Makes the processes, which then wait: no thread of this process may hold a lock meanwhile.
  void fork() {
    for (const int number : {0, 1}) {
      int ends[2];
      ASSERT_EQ(::pipe(ends), 0);
      const Descriptor reading(ends[0]);
      starting_[static_cast<std::size_t>(number)].reset(ends[1]);
      processes_[static_cast<std::size_t>(number)].emplace([this, number, &reading] {
        char now = 0;
        if (::read(reading.get(), &now, 1) == 1) launch(number);
        return true;
      });
    }
  }

  /// Does what is due, and a step of the workers.
  void step() {
    if (is_over()) return;
    train();
    const TimePoint now = steady_clock().now();
    start(0);
    if (nodes_[0]->joined || nodes_[0]->stands) start(1);
    switch (stage_) {
      case Stage::begins:
        if (!which_.returning) return begin(Stage::comes);
        if (!goes_on(kSomeSteps)) break;
        paused().stop();
        if (!paused().stands_still()) break;
        resume_ = now + pause();
        return begin(Stage::first_pause);
      case Stage::first_pause:
        if (now < resume_) break;
        node().counts = true;
        paused().go_on();
        return begin(Stage::comes);
      case Stage::comes:
        if (node().stands && paused().stands_still()) {
          reached_ = true;
          resume_ = now + pause();
          return begin(Stage::pause);
        }
        if (goes_on(kManySteps)) return begin(Stage::over);
        break;
      case Stage::pause:
        if (now < resume_) break;
        paused().go_on();
        return begin(Stage::goes_on);
      case Stage::goes_on:
        if (goes_on(kSomeSteps)) return begin(Stage::over);
        break;
      case Stage::over: return;
    }
    if (now > until_ || nodes_[0]->left || nodes_[1]->left) stage_ = Stage::over;
  }
  bool is_over() const { return stage_ == Stage::over; }
  /// Whether it came to the point.
  bool reached() const { return reached_; }

  void expect_nothing_lost() const {
    SCOPED_TRACE(name_of(which_));
    EXPECT_EQ(lost_, 0u) << "commits";
    for (const auto& node : nodes_) {
      // A launcher that could not join says what it could not reach. One that has been a member
      // stays.
      if (node->left) {
        EXPECT_FALSE(which_.returning) << node->why.data();
        EXPECT_NE(std::string(node->why.data()).find(kPlace), std::string::npos)
            << node->why.data();
      }
      EXPECT_FALSE(node->two_of_one_number.load());
    }
    if (!nodes_[0]->left && !nodes_[1]->left) {
      EXPECT_TRUE(goes_on(0)) << "both are members of epoch " << newest();
    }
    for (std::size_t i = 0; i < nodes_[0]->epochs.size(); ++i) {
      const std::uint64_t one = nodes_[0]->epochs[i], other = nodes_[1]->epochs[i];
      if (one != 0 && other != 0) {
        EXPECT_EQ(one, other) << "epoch " << i;
      }
    }
  }

 private:
  enum class Stage : std::uint8_t { begins, first_pause, comes, pause, goes_on, over };
  static constexpr const char* kPlace = "the service of the test";
  static constexpr std::uint32_t kSomeSteps = 10, kManySteps = 100;

  void begin(Stage stage) {
    stage_ = stage;
    before_ = committed_;
  }
  SharedNode& node() const { return *nodes_[static_cast<std::size_t>(which_.paused)]; }
  Bystander& paused() { return *processes_[static_cast<std::size_t>(which_.paused)]; }
  Duration pause() const { return 2 * kind_.ttl(); }
  std::uint32_t newest() const {
    return std::max(nodes_[0]->begun.load().epoch, nodes_[1]->begun.load().epoch);
  }

  /// Both nodes are in one epoch, and have made so many commits in it and in this stage.
  bool goes_on(std::uint32_t commits) const {
    for (const auto& node : nodes_) {
      const BegunWorkers begun = node->begun;
      if (begun.epoch == 0 || begun.epoch != newest() || begun.members != nodes_.size())
        return false;
    }
    return met_in_ == newest() && committed_ >= std::max(before_, met_at_) + commits;
  }

  /// The workers of an epoch have met when all its nodes have them in it. They have the newest
  /// commit of any of them then, and make the next one. No worker of an older epoch is heard.
  void train() {
    const std::uint32_t epoch = newest();
    if (epoch == 0 || epoch < met_in_) return;
    std::vector<std::pair<SharedNode*, std::uint16_t>> members;
    std::uint32_t size = 0, best = 0;
    for (const auto& node : nodes_) {
      const BegunWorkers begun = node->begun;
      if (begun.epoch != epoch) continue;
      size = begun.members;
      members.emplace_back(&*node, begun.life);
      const TrainedWorkers has = node->has;
      if (has.life == begun.life) best = std::max(best, has.commits);
    }
    if (members.size() != size) return;
    if (best < committed_) lost_ += committed_ - best;
    if (std::exchange(met_in_, epoch) != epoch) met_at_ = best;
    committed_ = best + 1;
    for (const auto& [member, life] : members) {
      TrainedWorkers has = member->has;
      if (has.life != life) has = {0, life, static_cast<std::uint16_t>(epoch)};
      has.commits = committed_;
      member->has = has;
    }
  }

  void start(int number) {
    const Descriptor end = std::move(starting_[static_cast<std::size_t>(number)]);
    if (end) {
      EXPECT_EQ(::write(end.get(), "y", 1), 1);
    }
  }

  /// In a process of its own.
  void launch(int number) const {
    SharedNode& shared = *nodes_[static_cast<std::size_t>(number)];
    NodeMembershipOptions options;
    options.name = "node/" + std::to_string(number);
    options.place = kPlace;
    options.job = "a job";
    options.ttl = kind_.ttl();
    options.out_limit = muster::testing::kMustHappen;
    options.epochs.max_nodes = 2;
    options.epochs.last_call = milliseconds(500);
    options.epochs.silence_patience = options.out_limit;
    options.epochs.keeps_state = true;
    const std::string host = "host" + std::to_string(number);
    const NodeDetails details{NodeFacts{1, "default", host, 0}, "launcher " + host, host, 1};
    // As `node_rendezvous.cc` has them.
    const Duration call = std::is_same_v<Kind, AgentKind> ? options.ttl : Duration(seconds(20));
    auto real = kind_.open({.call = call, .watch = options.ttl + options.out_limit});
    auto pauses = std::make_shared<Pauses>(
        which_.point, [this, number, &shared] { return number == which_.paused && shared.counts; },
        [&shared] { shared.stands = true; });
    auto pausing = std::make_unique<PausingMembership>(
        std::move(real), std::move(pauses),
        [&shared](const membership::Epoch& epoch) { shared.note_epoch(epoch); });
    LauncherRules rules;
    rules.by_epoch = rules.keep = true;
    LauncherProcess(shared, rules).run(std::move(pausing), options, details);
  }

  const PauseCase which_;
  const TimePoint until_;
  const Kind kind_;
  std::array<SharedNodeMemory, 2> nodes_;
  std::array<Descriptor, 2> starting_;
  std::array<std::optional<Bystander>, 2> processes_;
  Stage stage_ = Stage::begins;
  TimePoint resume_{};
  bool reached_ = false;
  std::uint32_t committed_ = 0, before_ = 0, met_in_ = 0, met_at_ = 0, lost_ = 0;
};

template <class Kind>
class PausedLaunchersTest : public ::testing::Test {};
using AllKinds = ::testing::Types<AgentKind, EtcdKind, KubernetesKind>;
TYPED_TEST_SUITE(PausedLaunchersTest, AllKinds);

constexpr std::size_t kAtOnce = 12;  // limit: jobs, of two processes each
constexpr Duration kStep = milliseconds(10);

// spec: L14.node a launcher that stands still for longer than its lease, at any point at which it
// waits or asks the service, while it joins and while it comes back, is a member again, and costs
// no committed step; no epoch's number is given twice. A sample of the points, and all of them in
// `make test-long`
TYPED_TEST(PausedLaunchersTest, NothingIsLostAtAnyPoint) {
  if (const std::string why = TypeParam::missing(); !why.empty()) GTEST_SKIP() << why;
  if (membership::testing::kForksStartNoThreads)
    GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  ASSERT_NE(TypeParam().open(), nullptr);  // starts the server
  std::vector<PauseCase> cases = all_cases();
  std::mt19937_64 random(muster::testing::test_seed());
  std::shuffle(cases.begin(), cases.end(), random);
  if (!muster::testing::long_tests()) cases.resize(kAtOnce);
  std::set<PausedCall> reached;
  for (std::size_t begin = 0; begin < cases.size(); begin += kAtOnce) {
    std::vector<std::unique_ptr<PausedLaunchers<TypeParam>>> jobs;
    for (std::size_t i = begin; i < std::min(begin + kAtOnce, cases.size()); ++i)
      jobs.push_back(std::make_unique<PausedLaunchers<TypeParam>>(cases[i]));
    for (const auto& job : jobs) job->fork();
    while (!std::ranges::all_of(jobs, [](const auto& job) { return job->is_over(); })) {
      for (const auto& job : jobs) job->step();
      std::this_thread::sleep_for(kStep);  // the work of the workers
    }
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      jobs[i]->expect_nothing_lost();
      if (jobs[i]->reached()) reached.insert(cases[begin + i].point.call);
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_FALSE(reached.empty());
  if (muster::testing::long_tests()) {
    EXPECT_EQ(reached.size(), 6u) << "kinds of calls";
  }
}

}  // namespace
}  // namespace muster::launch
