// SPDX-License-Identifier: BSD-3-Clause
// Calls that go on between two hosts while backward computes.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/group/group_core.h"
#include "core/trace/reader.h"
#include "muster/device_mesh.h"
#include "muster/distributed.h"
#include "muster/parallel.h"
#include "testing/limits.h"
#include "testing/network_namespaces.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"
#include "testing/thrown.h"
#include "train/fsdp/sharded_unit.h"
#include "train/fsdp/testing/busy_stack.h"
#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing {
namespace {

using fsdp::BusyImpl, fsdp::compute_until, fsdp::Net, fsdp::Options, fsdp::Stack;

constexpr int kHosts = 2;
constexpr std::int64_t kWidth = 256;  // a weight is a bucket of its own

/// Runs `body` in a process on each of `count` hosts, which have one rank each.
void on_hosts(int count, const std::function<void(int rank)>& body) {
  const auto net = NetworkNamespaces::create(count);
  ASSERT_TRUE(net.ok()) << net.status().message();
  const auto port = std::to_string(reserve_port());
  const auto store = "tcp://" + (*net)->address(0) + ":" + port;
  RankProcesses ranks(count, [&](int rank) -> std::string {
    try {
      if (const Status entered = (*net)->enter(rank); !entered) return entered.message();
      ::setenv("MUSTER_SECRET", "a secret that two hosts share, long enough", 1);
      torch::set_num_threads(1);
      init_process_group({.init_method = store,
                          .timeout = muster::testing::kMustHappen,
                          .world_size = count,
                          .rank = rank});
      body(rank);
      destroy_process_group();
    } catch (const std::exception& error) {
      return error.what();
    }
    return ::testing::Test::HasFailure() ? "failed" : "good";
  });
  for (const RankEnd& end : ranks.join(muster::testing::kMustHappen)) EXPECT_EQ(end.report, "good");
}

/// How many calls of `name` this rank has finished, by its trace.
std::size_t finished_calls(const std::string& name) {
  const auto trace = trace::read_trace(core_of(default_group()).parts().recorder->path());
  EXPECT_TRUE(trace.ok());
  std::size_t count = 0;
  for (const auto& record : trace->records)
    count += record.name == name && !record.under_way() ? 1 : 0;
  return count;
}

/// With the same weights on every rank.
Stack make_stack() {
  torch::manual_seed(1);
  return Stack(3, kWidth);
}

at::Tensor inputs(int rank) { return torch::full({4, kWidth}, 0.01 * (rank + 1)); }

/// The averages over the ranks of a stack's gradients.
std::vector<at::Tensor> averages() {
  std::vector<at::Tensor> sums;
  for (int rank = 0; rank < kHosts; ++rank) {
    Stack stack = make_stack();
    stack->forward(inputs(rank)).sum().backward();
    const auto parameters = stack->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto part = parameters[i].grad() / kHosts;
      if (rank == 0)
        sums.push_back(part);
      else
        sums[i] += part;
    }
  }
  return sums;
}

// spec: K2 overlapped: by the trace, the first bucket has travelled between hosts before backward
// makes the first layer's gradients
TEST(BetweenHosts, BucketsTravelDuringBackward) {
  on_hosts(kHosts, [](int rank) {
    Stack stack = make_stack();
    DistributedDataParallel<Stack> model(stack);
    const std::size_t before = finished_calls("all_reduce");
    stack->layers[0]->in_backward = [&] {
      compute_until([&] { return finished_calls("all_reduce") > before; });
    };
    model.forward(inputs(rank)).sum().backward();
    const auto expected = averages();
    const auto parameters = stack->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::allclose(parameters[i].grad(), expected[i])) << i;
  });
}

// spec: M1 T5 a unit's gradients travel between hosts while the next unit computes
TEST(BetweenHosts, ShardsAreReducedDuringBackward) {
  on_hosts(kHosts, [](int rank) {
    Stack stack = make_stack();
    FullyShardedDataParallel<Stack> model(stack,
                                          {.auto_wrap_policy = module_wrap_policy<BusyImpl>()});
    std::vector<parallel::ShardedUnit*> units;
    for (auto* each : model.unit_list())
      if (each != &model.unit()) units.push_back(each);
    const std::size_t before = finished_calls("reduce_scatter_tensor");
    for (std::size_t i = 0; i < 2; ++i)
      stack->layers[i]->in_backward = [&, i] {
        EXPECT_TRUE(units[i + 1]->parameters().is_reducing());
        compute_until([&] { return finished_calls("reduce_scatter_tensor") >= before + 2 - i; });
        EXPECT_TRUE(units[i + 1]->parameters().is_reducing()) << "its gradients are taken later";
      };
    model.forward(inputs(rank).requires_grad_()).sum().backward();
    const auto expected = averages();
    std::size_t next = 0;
    for (auto* unit : units) {
      EXPECT_FALSE(unit->parameters().is_reducing());
      for (std::size_t i = 0; i < unit->parameters().size(); ++i, ++next)
        EXPECT_TRUE(torch::allclose(unit->parameters()[i].grad(),
                                    unit->parameters().shard_of(i, expected[next])))
            << next;
    }
    EXPECT_EQ(next, expected.size());
  });
}

/// Steps of two passes each, the first of which is not averaged by itself.
template <class Forward, class NoSync>
void train(Net& net, Forward forward, NoSync no_sync) {
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    {
      [[maybe_unused]] const auto local = no_sync();
      forward(1).backward();
    }
    forward(2).backward();
    optimizer.step();
  }
}

std::vector<Options> options_between_hosts() {
  using enum ShardingStrategy;
  std::vector<Options> all = fsdp::kVariants;
  const Options by_layer = fsdp::kVariants[1];
  for (const auto strategy : {NO_SHARD, HYBRID_SHARD}) {
    all.push_back(by_layer);
    all.back().sharding_strategy = strategy;
  }
  all.back().device_mesh = init_device_mesh("cpu", {2, 2});
  all.push_back(by_layer);
  all.back().cpu_offload = true;
  all.push_back(by_layer);
  all.back().forward_prefetch = true;
  return all;
}

// spec: M1 M3 T5 every option trains between hosts, where reductions go on beside backward, what
// one process trains
TEST(BetweenHosts, ShardsTrainAsOneProcess) {
  Net alone = fsdp::net_of(1);
  train(
      alone,
      [&](int times) { return fsdp::loss_of(alone(fsdp::inputs() * times), fsdp::targets()); },
      [] { return 0; });
  const at::Tensor expected = flat(alone->parameters());
  constexpr int kRanks = 4;
  on_hosts(kRanks, [&](int rank) {
    int number = 0;
    for (const Options& options : options_between_hosts()) {
      Net net = fsdp::net_of(1);
      FullyShardedDataParallel<Net> model(net, options);
      train(
          net,
          [&](int times) {
            return fsdp::loss_of(model(fsdp::share(fsdp::inputs() * times, rank, kRanks)),
                                 fsdp::share(fsdp::targets(), rank, kRanks));
          },
          [&] { return model.no_sync(); });
      EXPECT_LT(fsdp::difference(fsdp::whole(model), expected), 1e-9) << "variant " << number++;
    }
  });
}

// spec: T5 an exception in backward while a unit's gradients travel reaches the other ranks
TEST(BetweenHosts, AnExceptionBesideAReductionReachesTheOthers) {
  on_hosts(kHosts, [](int rank) {
    Stack stack = make_stack();
    FullyShardedDataParallel<Stack> model(stack,
                                          {.auto_wrap_policy = module_wrap_policy<BusyImpl>()});
    if (rank == 1)
      stack->layers[0]->in_backward = [] { throw std::runtime_error("no gradient today"); };
    const auto loss = model.forward(inputs(rank).requires_grad_()).sum();
    if (rank == 1) {
      EXPECT_HAS(message_of<std::runtime_error>([&] { loss.backward(); }), "no gradient today");
    } else {
      EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }), "rank 1");
    }
    EXPECT_HAS(message_of<DistError>([&] { model.forward(inputs(rank)); }), "cannot go on");
  });
}

}  // namespace
}  // namespace muster::testing
