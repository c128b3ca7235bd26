// SPDX-License-Identifier: BSD-3-Clause
// Replicas of different speed: meetings by the clock, and weights by tokens.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/local_sgd.h"

namespace muster::testing {
namespace {

using ReplicaTensors = std::vector<at::Tensor>;

/// A clock that the test moves.
class MovedClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }

 private:
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
};

// spec: X3.clock replicas that make different numbers of steps meet at the same times, fragments in
// turn
TEST(LocalSgd, MeetsByTheClock) {
  on_ranks(2, [](int rank) {
    MovedClock clock;
    const ReplicaTensors first{torch::zeros({2}, at::kDouble)},
        second{torch::zeros({3}, at::kDouble)};
    parallel::ReplicaMeetings meetings({first, second}, {.name = "LocalSgd",
                                                         .group = nullptr,
                                                         .sync_every = 100,
                                                         .delay = 0,
                                                         .sync_period = std::chrono::seconds(20),
                                                         .by_tokens = false,
                                                         .mix = 0,
                                                         .compression = Compression::none,
                                                         .error_feedback = false,
                                                         .clock = &clock});
    meetings.set_update([&] {
      for (const at::Tensor& outer : meetings.outer_parameters())
        if (outer.grad().defined()) outer.sub_(outer.grad());
    });
    const int steps = rank == 0 ? 2 : 5;  // in the ten seconds to the next fragment's meeting
    const auto train = [&] {
      for (int step = 0; step < steps; ++step) {
        first[0].add_(1);
        second[0].add_(1);
        clock.advance(std::chrono::seconds(10) / steps);
        meetings.step(1);
      }
    };
    train();
    EXPECT_EQ(meetings.meetings(), 1);
    EXPECT_SAME(first[0], torch::full({2}, 3.5, at::kDouble));
    EXPECT_SAME(second[0], torch::full({3}, 1.0 * steps, at::kDouble));
    train();
    EXPECT_EQ(meetings.meetings(), 2);
    EXPECT_SAME(second[0], torch::full({3}, 7.0, at::kDouble));
    EXPECT_SAME(first[0], torch::full({2}, 3.5 + steps, at::kDouble));
    train();
    EXPECT_EQ(meetings.meetings(), 3);
    EXPECT_SAME(first[0], torch::full({2}, 3.5 + 7, at::kDouble));
    EXPECT_EQ(meetings.steps(), 3 * steps);
    EXPECT_EQ(meetings.tokens(), 7 + 14);  // at the first fragment's meetings
  });
}

// spec: X3.tokens what replicas have changed counts by their tokens, at once and with a delay; a
// state has them; a replica without any counts for nothing
TEST(DiLoCo, WeighsChangesByTokens) {
  for (const std::int64_t delay : {0, 1})
    on_ranks(3, [delay](int rank) {
      const auto plain = [](ReplicaTensors outer) {
        return std::make_unique<torch::optim::SGD>(std::move(outer), torch::optim::SGDOptions(1));
      };
      const DiLoCoOptions options{
          .sync_every = 2, .by_tokens = true, .delay = delay, .outer_optimizer = plain};
      auto first = torch::zeros({3}, at::kDouble), second = torch::zeros({3}, at::kDouble);
      DiLoCo one(ReplicaTensors{first}, options);
      one.step(50 * rank);
      first += 3 * rank;
      one.step(50 * rank);
      DiLoCo other(ReplicaTensors{second}, options);  // goes on
      second.copy_(first);
      other.load_state_dict(one.state_dict());
      if (delay > 0) other.step(0);
      EXPECT_SAME(second, torch::full({3}, 5.0, at::kDouble));  // (1 * 3 + 2 * 6) / 3
      EXPECT_EQ(other.tokens(), 300);
      for (int step = 0; step < 3; ++step) other.step(0);  // a meeting without tokens
      EXPECT_EQ(other.meetings(), 2);
      EXPECT_EQ(other.tokens(), 300);
      EXPECT_SAME(second, torch::full({3}, 5.0, at::kDouble));
      EXPECT_HAS(message_of<DistError>([&] { other.step(-1); }), "0 or more");
    });
}

}  // namespace
}  // namespace muster::testing
