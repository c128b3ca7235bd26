// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/batch_share.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <memory>

#include "core/group/testing/ranks.h"
#include "muster/errors.h"
#include "muster/parallel.h"

namespace muster::elastic {
namespace {

/// All ranges of all ranks, in order; checks each rank's.
void check_shares(std::int64_t batch, int world_size, std::int64_t largest) {
  std::int64_t next = 0;
  double weights = 0;
  std::size_t rounds = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    const auto ranges = share_of_batch_for(rank, world_size, batch, largest);
    if (rank == 0) rounds = ranges.size();
    ASSERT_EQ(ranges.size(), rounds) << "a rank would wait for another in its last round";
    for (const SampleRange& range : ranges) {
      ASSERT_EQ(range.first, next);
      ASSERT_GT(range.count, 0);
      if (largest > 0) ASSERT_LE(range.count, largest);
      ASSERT_DOUBLE_EQ(range.weight / world_size,
                       static_cast<double>(range.count) / static_cast<double>(batch));
      next += range.count;
      weights += range.weight;
    }
  }
  ASSERT_EQ(next, batch);
  ASSERT_NEAR(weights, world_size, 1e-9);
}

// spec: L10 whatever the number of ranks, a step has the same samples, each once and with the same
// weight; a rank that must not take more at once takes them in several rounds
TEST(ShareOfBatch, HasEachSampleOnceWithTheSameWeight) {
  for (const std::int64_t batch : {8, 31, 64, 1000}) {
    for (int world_size = 1; world_size <= 8; ++world_size) {
      for (const std::int64_t largest : {0, 2, 3, 7, 4096}) {
        SCOPED_TRACE(::testing::Message() << batch << " samples, " << world_size
                                          << " ranks, at most " << largest << " at once");
        check_shares(batch, world_size, largest);
      }
    }
  }
}

// spec: L10 a job that shrinks does twice the rounds, or takes twice the samples at once
TEST(ShareOfBatch, ShrunkJobAccumulatesOrTakesMore) {
  EXPECT_EQ(share_of_batch_for(0, 4, 64, 16).size(), 1U);
  EXPECT_EQ(share_of_batch_for(0, 2, 64, 16).size(), 2U);
  ASSERT_EQ(share_of_batch_for(1, 2, 64, 0).size(), 1U);
  EXPECT_EQ(share_of_batch_for(1, 2, 64, 0)[0].count, 32);
}

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::nn::functional::mse_loss(output, target);
}

// spec: L10 the gradients of a step are those of its whole batch, with any number of ranks and
// with accumulation
TEST(ShareOfBatch, GradientsAreThoseOfTheWholeBatch) {
  torch::manual_seed(1);
  const torch::Tensor input = torch::randn({14, 4}), target = torch::randn({14, 2});
  torch::nn::Linear whole(4, 2);
  loss_of(whole->forward(input), target).backward();
  testing::on_ranks(3, [&](int) {
    torch::nn::Linear net(4, 2);
    {
      const torch::NoGradGuard no_grad;
      net->weight.copy_(whole->weight);
      net->bias.copy_(whole->bias);
    }
    DistributedDataParallel ddp(net);
    const auto ranges = share_of_batch(14, 2);
    ASSERT_EQ(ranges.size(), 3U);
    for (std::size_t round = 0; round < ranges.size(); ++round) {
      const SampleRange& range = ranges[round];
      std::unique_ptr<decltype(ddp.no_sync())> accumulates;
      if (round + 1 < ranges.size()) accumulates.reset(new auto(ddp.no_sync()));
      const auto output = ddp.forward(input.narrow(0, range.first, range.count));
      (range.weight * loss_of(output, target.narrow(0, range.first, range.count))).backward();
    }
    EXPECT_TRUE(torch::allclose(net->weight.grad(), whole->weight.grad(), 1e-5, 1e-6));
    EXPECT_TRUE(torch::allclose(net->bias.grad(), whole->bias.grad(), 1e-5, 1e-6));
  });
}

TEST(ShareOfBatch, RefusesABatchThatLeavesARankIdle) {
  EXPECT_THROW(share_of_batch_for(0, 4, 3, 0), DistError);
  EXPECT_THROW(share_of_batch_for(0, 2, 3, 1), DistError);
  EXPECT_THROW(share_of_batch_for(0, 2, 8, -1), DistError);
}

}  // namespace
}  // namespace muster::elastic
