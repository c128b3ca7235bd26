// SPDX-License-Identifier: BSD-3-Clause
// Gathers that go on while units compute, by the order of events.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "train/fsdp/sharded_unit.h"
#include "train/fsdp/testing/busy_stack.h"
#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

using Events = std::vector<parallel::ShardedTimeline::TimelineEntry>;

std::ptrdiff_t place_of(const Events& events, const std::string& unit,
                        parallel::ShardedEvent event) {
  const auto found = std::ranges::find_if(
      events, [&](const auto& each) { return each.unit.ends_with(unit) && each.event == event; });
  return found == events.end() ? -1 : found - events.begin();
}

struct Model {
  explicit Model(const std::function<void(Options&)>& change) {
    Options options{.auto_wrap_policy = module_wrap_policy<BusyImpl>()};
    options.timeline = timeline;
    change(options);
    model = std::make_unique<FullyShardedDataParallel<Stack>>(stack, options);
    for (auto* each : model->unit_list())
      if (each != &model->unit()) units.push_back(each);
  }
  /// Computes until the gather of unit `which` is there, which nobody waits for.
  void compute_until_gathered(std::size_t which) {
    ASSERT_TRUE(units[which]->parameters().is_gathering()) << which;
    compute_until([&] { return units[which]->parameters().has_gathered(); });
    ++overlapped;
  }
  at::Tensor run() { return model->forward(torch::ones({2, 32}, torch::requires_grad())).sum(); }

  Stack stack{4, 32};
  std::shared_ptr<parallel::ShardedTimeline> timeline =
      std::make_shared<parallel::ShardedTimeline>();
  std::unique_ptr<FullyShardedDataParallel<Stack>> model;
  std::vector<parallel::ShardedUnit*> units;
  int overlapped = 0;
};

// spec: T5 backward prefetch overlaps: the next unit's gather begins and ends while this one's part
// of backward computes
TEST(ShardedPrefetch, OverlapsInBackward) {
  on_ranks(2, [](int) {
    using enum parallel::ShardedEvent;
    Model test([](Options&) {});
    for (std::size_t i = 1; i < 4; ++i)
      test.stack->layers[i]->in_backward = [&, i] { test.compute_until_gathered(i - 1); };
    test.stack->layers[0]->in_backward = [&] {
      for (auto* unit : test.units) EXPECT_FALSE(unit->parameters().is_gathering());
    };
    test.run().backward();
    EXPECT_EQ(test.overlapped, 3);
    const auto events = test.timeline->entries();
    for (int i = 1; i < 4; ++i) {
      const auto before = std::to_string(i - 1), unit = std::to_string(i);
      EXPECT_GE(place_of(events, " " + before, gather_started), 0);
      EXPECT_LT(place_of(events, " " + before, gather_started),
                place_of(events, " " + unit, backward_ended));
      EXPECT_LT(place_of(events, " " + unit, backward_ended),
                place_of(events, " " + before, backward_began));
    }
    EXPECT_EQ(test.model->memory().gathered, 0);
  });
}

// spec: T5 backward prefetch: BACKWARD_POST gathers after the unit's computation, none not at all
TEST(ShardedPrefetch, MayBeLateOrOff) {
  on_ranks(2, [](int) {
    using enum parallel::ShardedEvent;
    for (const bool late : {true, false}) {
      Model test([&](Options& options) {
        options.backward_prefetch = {};
        if (late) options.backward_prefetch = BackwardPrefetch::BACKWARD_POST;
      });
      test.run().backward();
      const auto events = test.timeline->entries();
      if (!late) {
        EXPECT_EQ(place_of(events, "", gather_started), -1);
        continue;
      }
      EXPECT_GT(place_of(events, " 2", gather_started), place_of(events, " 3", backward_ended));
      EXPECT_LT(place_of(events, " 2", gather_started), place_of(events, " 3", reduced));
    }
  });
}

// spec: T5 forward prefetch overlaps: from the second pass on, or by a list from the first on
TEST(ShardedPrefetch, OverlapsInForward) {
  on_ranks(2, [](int) {
    for (const bool by_list : {true, false}) {
      Model test([&](Options& options) { options.forward_prefetch = !by_list; });
      if (by_list) {
        for (std::size_t i = 0; i < 3; ++i)
          test.units[i]->set_forward_prefetch(std::vector{test.units[i + 1]});
      } else {
        const torch::NoGradGuard no_grad;
        test.run();
      }
      for (std::size_t i = 0; i < 3; ++i)
        test.stack->layers[i]->in_forward = [&, i] { test.compute_until_gathered(i + 1); };
      test.run().backward();
      EXPECT_EQ(test.overlapped, 3);
      EXPECT_EQ(test.model->memory().gathered, 0);
    }
  });
}

// Gathered parameters that a pass does not use are freed; shards that change after a gather are
// gathered anew.
TEST(ShardedPrefetch, IsNeverStale) {
  on_ranks(2, [](int) {
    Model test([](Options&) {});
    const auto handle = test.model->unshard(/*async_op=*/true);
    test.units[0]->start_unshard();
    {
      const torch::NoGradGuard no_grad;
      for (auto& each : test.stack->parameters()) each.fill_(0);
    }
    EXPECT_EQ(test.run().item<float>(), 0);
    test.units[1]->start_unshard();
    test.units[1]->reshard();
    EXPECT_EQ(test.model->memory().gathered, 0);
  });
}

// spec: T5 unshard(async_op): the parameters are whole when wait() returns
TEST(ShardedPrefetch, UnshardsWhenAsked) {
  on_ranks(2, [](int) {
    nn::Linear linear(6, 4);
    const auto weight = linear->weight.detach().clone();
    FullyShardedDataParallel<nn::Linear> model(linear, {.sync_module_states = false});
    auto handle = model.unshard(true);
    EXPECT_EQ(linear->weight.size(0), 2);
    handle.wait();
    EXPECT_EQ(linear->weight.size(0), 4);
    handle.wait();
    model.reshard();
    EXPECT_EQ(linear->weight.size(0), 2);
    model.unshard();
    EXPECT_EQ(linear->weight.size(0), 4);
    model.reshard();
    EXPECT_EQ(model.unsharded_bytes(), 0);
  });
}

// spec: T5 memory of prefetching: two units at a time, not all
TEST(ShardedPrefetch, HoldsTwoUnits) {
  on_ranks(2, [](int) {
    Model test([](Options&) {});
    test.model->reset_peak_memory();
    test.run().backward();
    const std::int64_t one = (32 * 32 + 32) * 4;
    EXPECT_GE(test.model->memory().gathered_peak, 2 * one);
    EXPECT_LT(test.model->memory().gathered_peak, 3 * one);
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
