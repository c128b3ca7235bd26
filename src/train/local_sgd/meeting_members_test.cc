// SPDX-License-Identifier: BSD-3-Clause
// Replicas that are lost, that join, and that have missed an average.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/group/call/call.h"
#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"
#include "muster/debug.h"
#include "muster/local_sgd.h"

namespace muster::testing {
namespace {

using MemberTensors = std::vector<at::Tensor>;

std::unique_ptr<torch::optim::Optimizer> plain_outer(MemberTensors outer) {
  return std::make_unique<torch::optim::SGD>(std::move(outer), torch::optim::SGDOptions(1));
}

void expect_same_on(const Group& group, const at::Tensor& mine) {
  auto all = torch::empty({group->size() * mine.numel()}, mine.options());
  all_gather_into_tensor(all, mine, {.group = group});
  for (const at::Tensor& each : all.chunk(group->size())) EXPECT_SAME(each, mine);
}

// spec: X2 a replica that is lost costs the others no step: in a new group the next meeting has
// what they have changed since the last one; a new replica takes their state and goes on with them
TEST(DiLoCoMembers, AreLostAndJoin) {
  for (const std::int64_t delay : {0, 1})
    on_ranks(3, [delay](int rank) {
      const Group first = new_group({.ranks = std::vector<int>{0, 1, 2}}),
                  survivors = new_group({.ranks = std::vector<int>{0, 1}}),
                  again = new_group({.ranks = std::vector<int>{0, 1, 2}});
      DiLoCoOptions options{
          .group = first, .sync_every = 2, .delay = delay, .outer_optimizer = plain_outer};
      auto parameter = torch::zeros({3}, at::kDouble);
      auto diloco = std::make_unique<DiLoCo>(MemberTensors{parameter}, options);
      std::int64_t steps = 0;  // since the last meeting was taken
      const auto step = [&] {
        ++steps;
        parameter += rank + 1;
        diloco->step();
      };
      // Goes on to the next meeting, which has all that was changed, except in the steps made while
      // the values travel, as `mix` is 0.
      const auto meet = [&](const Group& group) {
        const at::Tensor before = diloco->outer_parameters()[0].clone();
        const auto meetings = diloco->meetings();
        while (diloco->meetings() == meetings) step();
        auto change = torch::full({3}, 1.0 * (rank + 1) * (steps - delay), at::kDouble);
        all_reduce(change, {.op = ReduceOp::AVG, .group = group});
        EXPECT_SAME(parameter, before + change);
        steps = 0;
      };
      meet(first);
      if (rank == 2) {
        abort_process_group(first);
      } else {
        const auto lost = message_of<DistError>([&] {
          for (int i = 0; i < 2; ++i) step();
        });
        EXPECT_NE(lost, "");
        const at::Tensor before = parameter.clone();
        diloco->set_group(survivors);
        EXPECT_SAME(parameter, before);
        meet(survivors);
        EXPECT_EQ(diloco->meetings(), 2);
      }
      barrier();
      options.group = again;
      if (rank == 2) {
        parameter = torch::full({3}, -1.0, at::kDouble);
        diloco = std::make_unique<DiLoCo>(MemberTensors{parameter}, options);
        steps = 0;
      } else {
        diloco->set_group(again);
      }
      expect_same_on(again, parameter);
      EXPECT_EQ(diloco->meetings(), 2);
      meet(again);
      expect_same_on(again, parameter);
    });
}

// spec: X2 a new replica takes the outer optimizer's state too, and one that has missed an average
// takes the outer state of those that have it
TEST(DiLoCoMembers, TakeTheNewestOuterState) {
  on_ranks(3, [](int rank) {
    const Group pair = new_group({.ranks = std::vector<int>{0, 1}});
    DiLoCoOptions options{.group = pair, .sync_every = 1};  // Nesterov momentum
    auto parameter = torch::zeros({3});
    std::unique_ptr<DiLoCo> diloco;
    const auto step = [&] {
      parameter += rank + 1;
      diloco->step();
    };
    if (rank < 2) {
      diloco = std::make_unique<DiLoCo>(MemberTensors{parameter}, options);
      step();
      const auto state = diloco->state_dict();
      step();
      if (rank == 0) diloco->load_state_dict(state);  // as if it had missed the second
    }
    options.group = nullptr;
    if (rank < 2)
      diloco->set_group(default_group());
    else
      diloco = std::make_unique<DiLoCo>(MemberTensors{parameter}, options);
    EXPECT_EQ(diloco->meetings(), 2);
    expect_same_on(default_group(), parameter);
    for (int i = 0; i < 3; ++i) {
      step();
      expect_same_on(default_group(), parameter);
    }
    EXPECT_EQ(diloco->meetings(), 5);
  });
}

// spec: X2 a replica that has missed the average of a fragment takes that fragment alone: what it
// has changed of the others counts in their next meeting
TEST(DiLoCoMembers, KeepTheirChangesOfOtherFragments) {
  on_ranks(2, [](int rank) {
    auto first = torch::zeros({3}, at::kDouble), second = torch::zeros({2}, at::kDouble);
    DiLoCo diloco(std::vector<MemberTensors>{{first}, {second}},
                  {.sync_every = 2, .outer_optimizer = plain_outer});
    const auto step = [&] {
      first += rank + 1;
      second += rank + 1;
      diloco.step();
    };
    for (int i = 0; i < 2; ++i) step();  // each has met once
    const auto state = diloco.state_dict();
    step();
    if (rank == 0) {  // as if it had missed the first one's second meeting
      const auto others = second.clone();
      diloco.load_state_dict(state);
      diloco.set_group(nullptr);
      EXPECT_SAME(second, others);
    } else {
      diloco.set_group(nullptr);
    }
    EXPECT_SAME(first, torch::full({3}, 4.5, at::kDouble));
    step();
    EXPECT_SAME(second, torch::full({2}, 6.0, at::kDouble));
  });
}

/// Refuses a call of this member, as if it were lost there.
struct LostAt final : CallObserver {
  LostAt(Op op, int number) : op_(op), number_(number) {}
  std::uint64_t on_call(const Call& call) override {
    if (call.op() == op_ && calls_++ == number_) throw std::runtime_error("lost");
    return 0;
  }
  void on_submitted(const Call&, std::uint64_t, const WorkRef&) override {}
  void on_abort() noexcept override {}

 private:
  const Op op_;
  const int number_;
  int calls_ = 0;
};

// spec: X2 where the replica that gives its state is lost meanwhile, the others have taken nothing,
// or do not give what they have in part
TEST(DiLoCoMembers, TakeNothingInPart) {
  // The parameters, the numbers, the optimizer's state.
  constexpr std::pair<Op, int> kLost[] = {{Op::send, 0}, {Op::broadcast, 0}, {Op::send, 1}};
  for (const auto& [op, number] : kLost)
    on_ranks(3, [op = op, number = number](int rank) {
      const Group first = new_group({.ranks = std::vector<int>{0, 1, 2}}),
                  second = new_group({.ranks = std::vector<int>{0, 1, 2}}),
                  rest = new_group({.ranks = std::vector<int>{0, 2}});
      constexpr std::int64_t kLarge = 100'000;  // each has a message of its own
      const MemberTensors parameters{torch::zeros({kLarge}), torch::zeros({kLarge})};
      DiLoCo diloco(parameters, {.group = first, .sync_every = 1});  // Nesterov momentum
      const auto step = [&] {
        for (const at::Tensor& each : parameters) each.add_(rank + 1);
        diloco.step();
      };
      step();
      const auto state = diloco.state_dict();
      std::stringstream momentum;
      torch::save(diloco.outer_optimizer(), momentum);
      step();
      const at::Tensor newest = torch::cat(diloco.outer_parameters());
      if (rank == 0) {  // as if it had missed the second
        diloco.load_state_dict(state);
        torch::load(diloco.outer_optimizer(), momentum);
      }
      const at::Tensor before = torch::cat(diloco.outer_parameters());
      if (rank == 1) core_of(second).observe(std::make_shared<LostAt>(op, number));
      bool failed = false;
      try {
        diloco.set_group(second);
      } catch (const std::exception&) {
        failed = true;
      }
      abort_process_group(second);         // rank 2 may have sent its part, and not know
      if (rank != 2) EXPECT_TRUE(failed);  // rank 2 sends its part, and may be done
      if (number == 0) EXPECT_SAME(torch::cat(diloco.outer_parameters()), before);
      if (rank != 1) {
        diloco.set_group(rest);
        EXPECT_SAME(torch::cat(diloco.outer_parameters()), newest);
        for (int i = 0; i < 3; ++i) {
          step();
          expect_same_on(rest, parameters[1]);
        }
        EXPECT_EQ(diloco.meetings(), 5);
      }
      barrier();
    });
}

/// Counts the messages that this member sends.
struct CountsSends final : CallObserver {
  std::uint64_t on_call(const Call& call) override {
    sends += call.op() == Op::send ? 1 : 0;
    return 0;
  }
  void on_submitted(const Call&, std::uint64_t, const WorkRef&) override {}
  void on_abort() noexcept override {}
  int sends = 0;
};

// spec: X3.joiners a new replica takes a part of the outer state from each of the others
TEST(DiLoCoMembers, ANewOneTakesFromSeveral) {
  on_ranks(4, [](int rank) {
    const Group three = new_group({.ranks = std::vector<int>{0, 1, 2}});
    DiLoCoOptions options{.group = three, .sync_every = 1};  // Nesterov momentum
    const MemberTensors parameters{torch::zeros({50, 7}), torch::zeros({5}), torch::zeros({})};
    const auto step = [&](DiLoCo& diloco) {
      for (const at::Tensor& each : parameters) each.add_(torch::rand(each.sizes()));
      diloco.step();
    };
    std::unique_ptr<DiLoCo> diloco;
    if (rank < 3) {
      diloco = std::make_unique<DiLoCo>(parameters, options);
      for (int i = 0; i < 3; ++i) step(*diloco);
    }
    const auto counts = std::make_shared<CountsSends>();
    core_of(default_group()).observe(counts);
    options.group = nullptr;
    if (rank < 3)
      diloco->set_group(nullptr);
    else
      diloco = std::make_unique<DiLoCo>(parameters, options);
    EXPECT_EQ(counts->sends > 0, rank < 3) << counts->sends;
    EXPECT_EQ(diloco->meetings(), 3);
    for (const at::Tensor& each : diloco->outer_parameters())
      expect_same_on(default_group(), each.flatten());
    step(*diloco);  // with the momentum of the others
    for (const at::Tensor& each : parameters) expect_same_on(default_group(), each.flatten());
  });
}

// spec: X2.refusal an optimizer whose state cannot be saved is a refusal on all
TEST(DiLoCoMembers, AStateThatCannotBeSavedIsRefused) {
  on_ranks(2, [](int rank) {
    const auto made = [](const Group& group) {
      return std::make_unique<parallel::ReplicaMeetings>(
          std::vector<MemberTensors>{{torch::zeros({3})}},
          parallel::ReplicaMeetings::MeetingSchedule{.name = "DiLoCo",
                                                     .group = group,
                                                     .sync_every = 1,
                                                     .delay = 0,
                                                     .sync_period = {},
                                                     .by_tokens = false,
                                                     .mix = 0,
                                                     .compression = Compression::none,
                                                     .error_feedback = false});
    };
    const Group alone = new_group({.ranks = std::vector<int>{0}});
    auto meetings = made(rank == 0 ? alone : default_group());
    if (rank == 0) meetings->set_group(default_group());
    const auto save = []() -> at::Tensor { throw std::runtime_error("no such state"); };
    EXPECT_HAS(message_of<std::exception>(
                   [&] { meetings->share_optimizer(save, [](const at::Tensor&) {}); }),
               "no such state");
  });
}

// spec: X2.refusal a new replica with other options is refused on all
TEST(DiLoCoMembers, ANewOneWithOtherOptionsIsRefused) {
  on_ranks(3, [](int rank) {
    const Group pair = new_group({.ranks = std::vector<int>{0, 1}});
    auto parameter = torch::zeros({3});
    std::unique_ptr<DiLoCo> diloco;
    if (rank < 2)
      diloco = std::make_unique<DiLoCo>(MemberTensors{parameter},
                                        DiLoCoOptions{.group = pair, .sync_every = 3});
    const auto said = message_of<DistError>([&] {
      if (rank < 2)
        diloco->set_group(default_group());
      else
        diloco = std::make_unique<DiLoCo>(MemberTensors{parameter}, DiLoCoOptions{.sync_every = 4});
    });
    EXPECT_HAS(said, "sync_every 4");
  });
}

}  // namespace
}  // namespace muster::testing
