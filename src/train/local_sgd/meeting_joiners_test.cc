// SPDX-License-Identifier: BSD-3-Clause
// Replicas that join while the others train.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/group/call/call.h"
#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"
#include "muster/debug.h"
#include "muster/local_sgd.h"

namespace muster::testing {
namespace {

using JoinerTensors = std::vector<at::Tensor>;

/// Waits for what another rank does; throws if one fails instead.
template <class Condition>
void yield_until(const Condition& holds) {
  while (!holds()) {
    if (const Status failed = Interruption::of_thread(); !failed.ok()) throw DistError(failed);
    std::this_thread::yield();
  }
}

/// Nesterov momentum, counted, which fails after so many steps.
class CountedSgd final : public torch::optim::SGD {
 public:
  CountedSgd(JoinerTensors outer, std::atomic<int>* count, int fails_after = -1)
      : SGD(std::move(outer), torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true)),
        count_(count),
        fails_after_(fails_after) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    if (count_->load() == fails_after_) throw std::runtime_error("no memory");
    auto loss = SGD::step(std::move(closure));
    ++*count_;
    return loss;
  }

 private:
  std::atomic<int>* const count_;
  const int fails_after_;
};

/// The first `count` ranks.
std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// The last of `count` ranks joins, and the others train.
struct JoinCase {
  int ranks;
  std::int64_t sync_every, delay;
  int fragments;
  Compression compression;
};

/// One rank's part. `waits` opens once the others have met without the one that joins; `followed`
/// counts the meetings that this one has had from them, which are those after the fifth.
void join(int rank, const JoinCase& way, RankLatch& waits, std::atomic<int>& followed) {
  const Group training = new_group({.ranks = first_ranks(way.ranks - 1)}), all = new_group();
  const bool joins = rank == way.ranks - 1;
  std::atomic<int> taken{0};
  DiLoCoOptions options{.group = joins ? all : training,
                        .sync_every = way.sync_every,
                        .delay = way.delay,
                        .mix = way.delay > 0 ? 0.5 : 0,
                        .compression = way.compression};
  options.outer_optimizer = [&](JoinerTensors outer) {
    return std::make_unique<CountedSgd>(std::move(outer), joins ? &followed : &taken);
  };
  options.joins = joins;
  const JoinerTensors parameters{torch::zeros({50, 7}), torch::zeros({5}), torch::zeros({})};
  const std::vector<JoinerTensors> fragments =
      way.fragments == 1
          ? std::vector<JoinerTensors>{parameters}
          : std::vector<JoinerTensors>{{parameters[0]}, {parameters[1], parameters[2]}};
  std::unique_ptr<DiLoCo> diloco;
  const auto step = [&] {
    for (const at::Tensor& each : parameters) each.add_(torch::rand(each.sizes()));
    diloco->step();
  };
  if (joins) {
    waits.wait();
    diloco = std::make_unique<DiLoCo>(fragments, options);
  } else {
    diloco = std::make_unique<DiLoCo>(fragments, options);
    const auto meet = [&](std::int64_t times) {
      for (const auto last = diloco->meetings() + times; diloco->meetings() < last;) step();
    };
    meet(3);
    if (rank == 1) meet(1);  // they need not call it in the same step
    diloco->admit(all);
    meet(6 - (rank == 1 ? 1 : 0));  // the new one has not begun, and none waits for it
    EXPECT_TRUE(diloco->is_admitting());
    EXPECT_EQ(diloco->group(), training);
    waits.count_down();
    // Not faster than the new one can follow: a step here takes no time.
    while (diloco->is_admitting()) {
      yield_until([&] { return followed.load() >= diloco->meetings() - 5; });
      meet(1);
    }
  }
  EXPECT_EQ(diloco->group(), all);
  auto numbers = at::tensor({diloco->meetings(), diloco->steps()}, at::kLong);
  const at::Tensor mine = numbers.clone();
  broadcast(numbers, {.src = 0});
  EXPECT_SAME(mine, numbers);
  for (int i = 0; i < 3 * way.sync_every; ++i) step();
  for (const at::Tensor& each : diloco->outer_parameters()) {
    auto first = each.clone();
    broadcast(first, {.src = 0});
    EXPECT_SAME(each, first);  // with the momentum of the others
  }
  EXPECT_EQ(diloco->meetings(), mine[0].item<std::int64_t>() + 3 * way.fragments);
}

// spec: X3.joiners a new replica takes the outer state from 2 and 3 others that train on, none of
// which waits for it, and enters a meeting with the state that they have
TEST(DiLoCoJoiners, EnterWhileTheOthersTrain) {
  for (const JoinCase& way :
       {JoinCase{3, 1, 0, 1, Compression::none}, JoinCase{4, 2, 0, 2, Compression::none},
        JoinCase{3, 6, 1, 2, Compression::int8}, JoinCase{4, 4, 2, 1, Compression::int4}}) {
    RankLatch waits(way.ranks - 1);
    std::atomic<int> followed{0};
    on_ranks(way.ranks, [&](int rank) { join(rank, way, waits, followed); });
  }
}

/// A clock that the test sets.
class SetClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }

 private:
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
};

// spec: X3.joiners, X3.clock two replicas join at once others that meet by the clock, each with a
// number of steps of its own
TEST(DiLoCoJoiners, EnterMeetingsByTheClock) {
  std::atomic<int> followed[2] = {0, 0};
  on_ranks(4, [&](int rank) {
    const Group pair = new_group({.ranks = first_ranks(2)}), all = new_group();
    const bool joins = rank >= 2;
    SetClock clock;
    const JoinerTensors parameters{torch::zeros({7}, at::kDouble)};
    parallel::ReplicaMeetings meetings({parameters}, {.name = "LocalSgd",
                                                      .group = joins ? all : pair,
                                                      .sync_every = 100,
                                                      .delay = 0,
                                                      .sync_period = std::chrono::seconds(10),
                                                      .by_tokens = true,
                                                      .mix = 0,
                                                      .compression = Compression::none,
                                                      .error_feedback = false,
                                                      .joins = joins,
                                                      .clock = &clock});
    meetings.set_update([&] {
      for (const at::Tensor& outer : meetings.outer_parameters())
        if (outer.grad().defined()) outer.sub_(outer.grad());
      if (joins) ++followed[rank - 2];
    });
    meetings.enter();
    const int steps = rank == 0 ? 2 : rank == 1 ? 5 : 4;  // in ten seconds
    const auto train = [&] {
      for (int step = 0; step < steps; ++step) {
        parameters[0].add_(rank + 1);
        clock.advance(Duration(std::chrono::seconds(10)) / steps);
        meetings.step(step);
      }
    };
    if (!joins) {
      const auto least = [&] { return std::min(followed[0].load(), followed[1].load()); };
      meetings.admit(all);
      train();  // the snapshot
      while (meetings.is_admitting()) {
        const int before = least();
        train();
        if (meetings.is_admitting()) yield_until([&] { return least() > before; });
      }
    }
    EXPECT_EQ(meetings.group(), all);
    const auto met = meetings.meetings();
    train();
    EXPECT_EQ(meetings.meetings(), met + 1);
    auto first = parameters[0].clone();
    broadcast(first, {.src = 0});
    EXPECT_SAME(parameters[0], first);
  });
}

/// Refuses this member's calls from that of this number on, as if it were lost there.
struct EndsAt final : CallObserver {
  EndsAt(Op op, int number) : op_(op), number_(number) {}
  std::uint64_t on_call(const Call& call) override {
    ended_ = ended_ || (call.op() == op_ && calls_++ == number_);
    if (ended_) throw std::runtime_error("lost");
    return 0;
  }
  void on_submitted(const Call&, std::uint64_t, const WorkRef&) override {}
  void on_abort() noexcept override {}

 private:
  const Op op_;
  const int number_;
  int calls_ = 0;
  bool ended_ = false;
};

/// Steps until no member of the group sees an admission; all make the same number of steps.
template <class Meets, class Step>
void step_until_all_agree(const Meets& meets, const Group& group, const Step& step) {
  for (bool goes_on = true; goes_on;) {
    step();
    at::Tensor undone = at::full({1}, meets.is_admitting() ? 1 : 0, at::kLong);
    all_reduce(undone, {.group = group});
    goes_on = undone.item<std::int64_t>() > 0;
  }
}

// spec: X3.joiners one that is lost before it has entered costs the others no meeting
TEST(DiLoCoJoiners, AreLostWithoutCost) {
  for (const int replicas : {2, 3})
    for (const auto& [op, number] :
         {std::pair(Op::recv, 0), std::pair(Op::recv, 1), std::pair(Op::recv, replicas * 2 + 2),
          std::pair(Op::send, 0)}) {
      on_ranks(replicas + 1, [&, op = op, number = number](int rank) {
        const Group training = new_group({.ranks = first_ranks(replicas)}), all = new_group();
        const JoinerTensors parameters{torch::zeros({500})};
        DiLoCoOptions options{.group = training, .sync_every = 1};
        if (rank == replicas) {
          core_of(all).observe(std::make_shared<EndsAt>(op, number));
          options.group = all;
          options.joins = true;
          EXPECT_ANY_THROW(DiLoCo(parameters, options));
        } else {
          DiLoCo diloco(parameters, options);
          const auto step = [&] {
            parameters[0].add_(rank + 1);
            diloco.step();  // does not throw
          };
          diloco.admit(all);
          for (int i = 0; i < 3; ++i) step();
          yield_until([&] { return !all->failure().ok(); });  // the new one says so itself
          step_until_all_agree(diloco, training, step);
          EXPECT_EQ(diloco.group(), training);
          const auto meetings = diloco.meetings();
          EXPECT_EQ(meetings, diloco.steps());
          step();
          EXPECT_EQ(diloco.meetings(), meetings + 1);
          auto first = parameters[0].clone();
          broadcast(first, {.src = 0, .group = training});
          EXPECT_SAME(parameters[0], first);
        }
        barrier();
      });
    }
}

// spec: X3.joiners one that fails, in its entry too, says why to the others, none of which waits
TEST(DiLoCoJoiners, ThatFailSayWhy) {
  for (int fails_after = 0; fails_after < 4; ++fails_after) {
    std::atomic<int> followed{0};
    on_ranks(3, [&](int rank) {
      const Group pair = new_group({.ranks = first_ranks(2)}), all = new_group();
      const JoinerTensors parameters{torch::zeros({5})};
      DiLoCoOptions options{.group = pair, .sync_every = 1};
      if (rank == 2) {
        options.group = all;
        options.joins = true;
        options.outer_optimizer = [&](JoinerTensors outer) {
          return std::make_unique<CountedSgd>(std::move(outer), &followed, fails_after);
        };
        bool failed = false;
        try {
          DiLoCo(parameters, options);
        } catch (const std::runtime_error& error) {
          EXPECT_STREQ(error.what(), "no memory");
          failed = true;
        }
        if (!failed) abort_process_group(all, "no memory");  // it has entered before
        barrier();
        return;
      }
      DiLoCo diloco(parameters, options);
      const auto step = [&] {
        parameters[0].add_(rank + 1);
        diloco.step();
      };
      diloco.admit(all);
      step();  // the snapshot
      while (diloco.is_admitting()) {
        yield_until(
            [&] { return followed.load() >= diloco.meetings() - 1 || !all->failure().ok(); });
        step();
      }
      if (diloco.group() == all) {
        EXPECT_HAS(message_of<DistError>([&] {
                     step();
                     step();
                   }),
                   "no memory");
        diloco.set_group(pair);
      }
      EXPECT_HAS(all->failure().message(), "no memory");
      step();
      auto first = parameters[0].clone();
      broadcast(first, {.src = 0, .group = pair});
      EXPECT_SAME(parameters[0], first);
      barrier();
    });
  }
}

// spec: X3.joiners a member that cannot copy its state goes on to train, as the others do
TEST(DiLoCoJoiners, AreNotAdmittedByMembersThatCannotCopy) {
  on_ranks(3, [&](int rank) {
    const Group pair = new_group({.ranks = first_ranks(2)}), all = new_group();
    const JoinerTensors parameters{torch::zeros({5})};
    parallel::ReplicaMeetings meetings({parameters}, {.name = "DiLoCo",
                                                      .group = rank == 2 ? all : pair,
                                                      .sync_every = 1,
                                                      .delay = 0,
                                                      .sync_period = {},
                                                      .by_tokens = false,
                                                      .mix = 0,
                                                      .compression = Compression::none,
                                                      .error_feedback = false,
                                                      .joins = rank == 2});
    meetings.set_update([] {});
    meetings.share_optimizer(
        [&]() -> at::Tensor {
          if (rank == 1) throw std::runtime_error("no memory");
          return torch::zeros({3}, at::kByte);
        },
        [](const at::Tensor&) {});
    if (rank == 2) {
      EXPECT_HAS(message_of<DistError>([&] { meetings.enter(); }), "could not be admitted");
    } else {
      meetings.admit(all);
      step_until_all_agree(meetings, pair, [&] { meetings.step(1); });
      EXPECT_EQ(meetings.group(), pair);
      EXPECT_EQ(meetings.meetings(), meetings.steps());
    }
    barrier();
  });
}

// spec: X3.joiners one that never comes is given up after 64 meetings, told why once it does, and
// holds up neither the others nor the end of its group, large messages of which it has not taken
TEST(DiLoCoJoiners, ThatNeverComeAreGivenUp) {
  std::atomic<bool> given_up{false};
  on_ranks(3, [&](int rank) {
    const Group pair = new_group({.ranks = first_ranks(2)}), all = new_group();
    const JoinerTensors parameters{torch::zeros({50'000})};
    DiLoCoOptions options{.group = pair, .sync_every = 1};
    if (rank == 2) {
      yield_until([&] { return given_up.load(); });
      options.group = all;
      options.joins = true;
      EXPECT_HAS(message_of<DistError>([&] { DiLoCo(parameters, options); }), "meetings behind");
      barrier();
      return;
    }
    DiLoCo diloco(parameters, options);
    diloco.admit(all);
    step_until_all_agree(diloco, pair, [&] { diloco.step(); });
    EXPECT_EQ(diloco.group(), pair);
    EXPECT_FALSE(all->failure().ok());
    given_up = true;
    barrier();
  });
}

// spec: X3.joiners a member that is lost while another joins: the other takes nothing and says so,
// those that are left go on, and may admit it again
TEST(DiLoCoJoiners, MayComeAgainIfASenderIsLost) {
  std::atomic<int> followed{0};
  RankLatch left(2);
  on_ranks(4, [&](int rank) {
    const Group three = new_group({.ranks = first_ranks(3)}), all = new_group(),
                two = new_group({.ranks = std::vector<int>{0, 1}}),
                again = new_group({.ranks = std::vector<int>{0, 1, 3}});
    const JoinerTensors parameters{torch::zeros({500})};
    DiLoCoOptions options{.group = three, .sync_every = 1};
    options.outer_optimizer = [&](JoinerTensors outer) {
      static std::atomic<int> unused;
      return std::make_unique<CountedSgd>(std::move(outer), rank == 3 ? &followed : &unused);
    };
    std::unique_ptr<DiLoCo> diloco;
    const auto step = [&] {
      parameters[0].add_(torch::rand({500}));
      diloco->step();
    };
    if (rank == 3) {
      options.joins = true;
      options.group = all;
      EXPECT_ANY_THROW(DiLoCo(parameters, options));
      EXPECT_SAME(parameters[0], torch::zeros({500}));
      left.wait();
      options.group = again;
      diloco = std::make_unique<DiLoCo>(parameters, options);
    } else {
      diloco = std::make_unique<DiLoCo>(parameters, options);
      if (rank == 2) core_of(all).observe(std::make_shared<EndsAt>(Op::send, 2));  // its part
      diloco->admit(all);
      if (rank == 2) {
        step();
        step();  // sends what the first has left
        abort_process_group(all);
        abort_process_group(three);
        barrier();
        return;
      }
      EXPECT_NE(message_of<DistError>([&] {
                  for (int i = 0; i < 4; ++i) step();
                }),
                "");
      diloco->set_group(two);
      EXPECT_FALSE(diloco->is_admitting());
      step();
      left.count_down();
      diloco->admit(again);
      step();  // the snapshot
      while (diloco->is_admitting()) {
        const int before = followed.load();
        step();
        if (diloco->is_admitting()) yield_until([&] { return followed.load() > before; });
      }
    }
    EXPECT_EQ(diloco->group(), again);
    step();
    auto first = parameters[0].clone();
    broadcast(first, {.src = 0, .group = again});
    EXPECT_SAME(parameters[0], first);
    barrier();
  });
}

// spec: X3.joiners one with other options says what differs, and the others go on
TEST(DiLoCoJoiners, WithOtherOptionsAreNamed) {
  on_ranks(3, [&](int rank) {
    const Group pair = new_group({.ranks = first_ranks(2)}), all = new_group();
    const JoinerTensors parameters{torch::zeros({5})};
    LocalSgdOptions options{.group = pair, .sync_every = 1};
    if (rank == 2) {
      options.group = all;
      options.joins = true;
      options.sync_every = 2;
      EXPECT_HAS(message_of<DistError>([&] { LocalSgd(parameters, options); }),
                 "'sync_every 1' on rank 0 and 'sync_every 2' on rank 2");
      barrier();
      return;
    }
    LocalSgd local(parameters, options);
    local.admit(all);
    for (int i = 0; i < 3; ++i) local.step();
    yield_until([&] { return !all->failure().ok(); });
    EXPECT_HAS(all->failure().message(), "'sync_every 2' on rank 2");
    step_until_all_agree(local, pair, [&] { local.step(); });
    EXPECT_EQ(local.group(), pair);
    local.admit(all);  // a group that has failed
    step_until_all_agree(local, pair, [&] { local.step(); });
    EXPECT_EQ(local.group(), pair);
    EXPECT_EQ(local.meetings(), local.steps());
    barrier();
  });
}

// spec: X3.joiners what cannot be admitted is refused at once, by name
TEST(DiLoCoJoiners, ThatCannotComeAreRefused) {
  on_ranks(3, [](int rank) {
    const Group pair = new_group({.ranks = first_ranks(2)}),
                others = new_group({.ranks = std::vector<int>{1, 2}}), all = new_group();
    const JoinerTensors first{torch::zeros({5})}, second{torch::zeros({2})};
    if (rank == 2) {
      EXPECT_HAS(message_of<DistError>([&] { DiLoCo joiner(first, {.joins = true}); }),
                 "by new_group()");
      return;
    }
    const auto refusal = [](auto& meets, const Group& wider) {
      return message_of<DistError>([&] { meets.admit(wider); });
    };
    DiLoCo plain(first, {.group = pair, .sync_every = 4});
    EXPECT_HAS(refusal(plain, pair), "meet already");
    EXPECT_HAS(refusal(plain, nullptr), "not a member");
    EXPECT_HAS(refusal(plain, default_group()), "by new_group()");
    if (rank == 1) EXPECT_HAS(refusal(plain, others), "rank 0 meets");
    plain.admit(all);
    EXPECT_HAS(refusal(plain, all), "an admission goes on");
    DiLoCo overlapping(std::vector<JoinerTensors>{first, second},
                       {.group = pair, .sync_every = 4, .delay = 2});
    EXPECT_HAS(refusal(overlapping, all), "meetings overlap");
  });
}

}  // namespace
}  // namespace muster::testing
