// SPDX-License-Identifier: BSD-3-Clause
#include "train/pipeline/stage_messages.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <thread>

#include "core/group/testing/ranks.h"

namespace muster::pipeline {
namespace {

using testing::message_of;
using testing::on_ranks;
using StageTraffic = StageMessages::StageTraffic;

constexpr auto kShort = std::chrono::seconds(2);

// spec: T2 the deadline of a message counts from when its wait begins, not from a step long before,
// in which it was started
TEST(StageMessages, TheDeadlineCountsFromTheWait) {
  on_ranks(2, [](int rank) {
    StageMessages messages(new_group({.timeout = kShort}));
    const StageMessages::Neighbour other{0, 1 - rank};
    const auto large = torch::ones({1 << 20});  // waits for its receiver
    // The time that passes is what the test is about.
    const auto compute = [] { std::this_thread::sleep_for(2 * kShort); };
    barrier();
    if (rank == 0) {
      messages.send(other, StageTraffic::activations, {large});
      messages.finish();
      compute();
      barrier();
      messages.send(other, StageTraffic::activations, {large});
      compute();
      barrier();
      messages.finish();
    } else {
      messages.receive(other, StageTraffic::activations, at::kCPU);
      messages.post(other, StageTraffic::activations, at::kCPU);
      compute();
      barrier();
      barrier();
      const auto got = messages.receive(other, StageTraffic::activations, at::kCPU);
      EXPECT_TRUE(got.at(0).equal(large));
    }
    barrier();
    if (rank == 1) {
      const auto text = message_of<DistError>(
          [&] { messages.receive(other, StageTraffic::activations, at::kCPU); });
      EXPECT_HAS(text, "rank 0 sent nothing within the 2 s that this rank waited for it");
    }
    barrier();
  });
}

}  // namespace
}  // namespace muster::pipeline
