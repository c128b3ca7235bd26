// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>

#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

class ShardedStates : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedStates, ::testing::Values(1, 2, 3, 4));

// spec: M2 state_dict called on every rank gives the full one on rank 0, and a sharded form;
// loading reshards
TEST_P(ShardedStates, StateComesWholeAndInShards) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    FullyShardedDataParallel<Net> model(net_of(1), kVariants[1]);
    const StateDict full = model.state_dict();
    EXPECT_EQ(full.empty(), rank != 0);
    const StateDict everywhere = model.state_dict(/*rank0_only=*/false);
    Net expected = net_of(1);
    ASSERT_EQ(everywhere.size(), expected->parameters().size());
    for (std::size_t i = 0; i < everywhere.size(); ++i) {
      const auto item = expected->named_parameters()[i];
      EXPECT_EQ(everywhere[i].first, item.key());
      EXPECT_SAME(everywhere[i].second, item.value().detach());
      if (rank == 0) EXPECT_SAME(full[i].second, item.value().detach());
    }
    FullyShardedDataParallel<Net> other(net_of(7), {});  // other units
    other.load_state_dict(everywhere);
    EXPECT_SAME(whole(other), whole(model));
    FullyShardedDataParallel<Net> third(net_of(9), kVariants[1]);
    third.load_sharded_state_dict(model.sharded_state_dict());
    EXPECT_SAME(whole(third), whole(model));
  });
}

TEST(ShardedState, WhatDoesNotFitIsNamed) {
  on_ranks(2, [&](int) {
    FullyShardedDataParallel<Net> model(net_of(1), {});
    StateDict state = model.state_dict(false);
    state.emplace_back("more", torch::zeros({1}));
    EXPECT_HAS(message_of<DistError>([&] { model.load_state_dict(state); }), "'more'");
    state.pop_back();
    state.back().second = torch::zeros({2, 2}, at::kDouble);
    EXPECT_HAS(message_of<DistError>([&] { model.load_state_dict(state); }), state.back().first);
    state.pop_back();
    EXPECT_HAS(message_of<DistError>([&] { model.load_state_dict(state); }), "is not in the state");
  });
}

TEST(ShardedState, SummonedParametersCanBeSavedLoadedAndChanged) {
  on_ranks(2, [&](int) {
    FullyShardedDataParallel<Net> model(net_of(1), kVariants[1]), other(net_of(5), kVariants[1]);
    std::stringstream file;
    {
      const auto full = model.summon_full_params(false);
      torch::save(model.module(), file);
    }
    {
      const auto full = other.summon_full_params();
      torch::load(other.module(), file);
    }
    EXPECT_SAME(whole(other), whole(model));
    {
      const auto full = other.summon_full_params(false);
      const torch::NoGradGuard no_grad;
      other.module()->first->weight.zero_();
    }
    EXPECT_SAME(whole(other), whole(model));
  });
}

// With sync_module_states, every rank gets rank 0's values, including buffers; without, each rank
// keeps the shard of its own.
TEST(ShardedState, ComesFromRankZeroWhereAskedFor) {
  on_ranks(2, [&](int rank) {
    Typed synced, own;
    for (const auto& each : {synced, own}) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : each->parameters()) parameter.fill_(rank + 1);
      each->mean.fill_(rank + 5);
    }
    FullyShardedDataParallel<Typed> first(synced), second(own, {.sync_module_states = false});
    EXPECT_SAME(whole(first), torch::ones({24}));
    EXPECT_SAME(synced->mean, torch::full({4}, 5.f));
    EXPECT_EQ(whole(second).min().item<float>(), 1);
    EXPECT_EQ(whole(second).max().item<float>(), 2);
    EXPECT_SAME(own->mean, torch::full({4}, rank + 5.f));
    const StateDict state = first.state_dict(false);
    EXPECT_EQ(state.back().first, "mean");
    EXPECT_SAME(state.back().second, torch::full({4}, 5.f));
  });
}

// spec: M2 loading reshards: 3 ranks load the state saved by 2
TEST(ShardedState, GoesToAnotherNumberOfRanks) {
  std::stringstream file;
  on_ranks(2, [&](int rank) {
    FullyShardedDataParallel<Net> model(net_of(3), kVariants[1]);
    const StateDict state = model.state_dict();
    if (rank != 0) return;
    torch::serialize::OutputArchive archive;
    for (const auto& [name, tensor] : state) archive.write(name, tensor);
    archive.save_to(file);
  });
  const std::string saved = file.str();
  on_ranks(3, [&](int) {
    FullyShardedDataParallel<Net> model(net_of(8));
    std::istringstream from(saved);
    torch::serialize::InputArchive archive;
    archive.load_from(from);
    StateDict state;
    for (const auto& item : net_of(8)->named_parameters()) {
      at::Tensor value;
      archive.read(item.key(), value);
      state.emplace_back(item.key(), value);
    }
    model.load_state_dict(state);
    EXPECT_SAME(whole(model), flat(net_of(3)->parameters()));
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
