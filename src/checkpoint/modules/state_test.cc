// SPDX-License-Identifier: BSD-3-Clause
// Models and optimizers of every wrapping, saved by some ranks and loaded by others.

#include "muster/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "checkpoint/format/load.h"
#include "checkpoint/modules/engine.h"
#include "checkpoint/modules/items.h"
#include "core/base/process/temporary_folder.h"
#include "core/base/threads/thread_start.h"
#include "core/group/testing/ranks.h"
#include "muster/debug.h"
#include "muster/device_mesh.h"
#include "muster/parallel.h"

namespace muster::checkpoint {
namespace {

using testing::on_ranks;
using torch::nn::Linear;
using torch::nn::Sequential;

Sequential make_net(std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return Sequential(Linear(5, 7), torch::nn::BatchNorm1d(7), Linear(7, 3));
}

enum class Wrap { plain, ddp, fsdp, fsdp_units, hybrid, no_shard };

/// A net, wrapped, with an optimizer; ranks train on different data unless it is plain.
template <class Optimizer, class Options>
struct Trained {
  Sequential net = make_net();
  std::optional<DistributedDataParallel<Sequential>> ddp;
  std::optional<FullyShardedDataParallel<Sequential>> fsdp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  Trained(Wrap wrap, bool zero, const Options& options) {
    if (wrap == Wrap::ddp) ddp.emplace(net);
    if (wrap == Wrap::fsdp) fsdp.emplace(net);
    if (wrap == Wrap::fsdp_units)
      fsdp.emplace(net, FullyShardedDataParallelOptions{
                            .auto_wrap_policy = module_wrap_policy<torch::nn::LinearImpl>()});
    if (wrap == Wrap::hybrid)
      fsdp.emplace(net, FullyShardedDataParallelOptions{
                            .auto_wrap_policy = module_wrap_policy<torch::nn::LinearImpl>(),
                            .sharding_strategy = ShardingStrategy::HYBRID_SHARD,
                            .device_mesh = init_device_mesh("cpu", {2, get_world_size() / 2})});
    if (wrap == Wrap::no_shard)
      fsdp.emplace(
          net, FullyShardedDataParallelOptions{.sharding_strategy = ShardingStrategy::NO_SHARD});
    if (zero)
      optimizer = std::make_unique<ZeroRedundancyOptimizer<Optimizer>>(net->parameters(), options);
    else
      optimizer = std::make_unique<Optimizer>(net->parameters(), options);
  }
  /// The same data on all ranks, so that all wrappings train alike.
  void step(int number) {
    optimizer->zero_grad();
    const auto random = at::detail::createCPUGenerator(100 + static_cast<std::uint64_t>(number));
    const auto x = at::randn({4, 5}, random);
    const auto y = ddp ? (*ddp)(x) : fsdp ? (*fsdp)(x) : net->forward(x);
    y.square().mean().backward();
    optimizer->step();
  }
  State state() {
    State state;
    state.add_module("model", *net).add_optimizer("optimizer", *optimizer, *net);
    return state;
  }
};

using Adam = Trained<torch::optim::Adam, torch::optim::AdamOptions>;

/// All tensors of a checkpoint, whole.
std::map<std::string, at::Tensor> tensors_of(const std::string& path) {
  auto index = shards::open_index(path);
  EXPECT_TRUE(index.ok()) << index.status().message();
  std::vector<CheckpointItem> items;
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : index->tensors) {
    all[name] = at::empty(tensor.sizes, scalar_type_of(tensor.dtype));
    items.push_back(whole_item(name, all[name]));
  }
  load_items(*index, items, {});
  return all;
}

struct Way {
  int ranks;
  Wrap wrap;
  bool zero;
};
constexpr Way kWays[] = {{1, Wrap::plain, false},  {2, Wrap::ddp, false},
                         {3, Wrap::ddp, true},     {4, Wrap::fsdp, false},
                         {3, Wrap::fsdp, false},   {2, Wrap::fsdp_units, false},
                         {4, Wrap::hybrid, false}, {2, Wrap::no_shard, false}};

// spec: T5 M2 models of hybrid sharding and of NO_SHARD are saved, and read by other rank counts
// spec: S1 modules, optimizers, FSDP, ZeRO, S2 any wrapping and number of ranks reads what another
// wrote, bit for bit
TEST(CheckpointState, AnyWrappingReadsAnyOther) {
  const TemporaryFolder folder("muster-checkpoint-");
  for (std::size_t from = 0; from < std::size(kWays); ++from) {
    const std::string written = folder.path() + "/" + std::to_string(from);
    const Way& way = kWays[from];
    on_ranks(way.ranks, [&](int) {
      Adam trained(way.wrap, way.zero, torch::optim::AdamOptions(0.05).amsgrad(true));
      for (int step = 0; step < 3; ++step) trained.step(step);
      save(trained.state(), written);
    });
    const auto expected = tensors_of(written);
    EXPECT_EQ(expected.size(), 6u + 3u + 6u * 4u);
    for (std::size_t to = 0; to < std::size(kWays); ++to) {
      const Way& other = kWays[to];
      const std::string again = folder.path() + "/again";
      on_ranks(other.ranks, [&](int) {
        Adam fresh(other.wrap, other.zero, torch::optim::AdamOptions(0.5));
        auto state = fresh.state();
        load(state, written);
        auto& options = fresh.optimizer->param_groups()[0].options();
        EXPECT_EQ(options.get_lr(), 0.05);
        EXPECT_TRUE(static_cast<torch::optim::AdamOptions&>(options).amsgrad());
        save(fresh.state(), again);
        fresh.step(3);  // what was loaded is what the optimizer works on
      });
      const auto found = tensors_of(again);
      ASSERT_EQ(found.size(), expected.size()) << from << " to " << to;
      for (const auto& [name, tensor] : expected)
        EXPECT_TRUE(torch::equal(tensor, found.at(name))) << name << ", " << from << " to " << to;
    }
  }
}

// spec: S1 FSDP: a parameter and what an optimizer keeps of it is one box of its own shape
TEST(CheckpointState, ShardedParametersAreBoxesOfTheirShape) {
  on_ranks(3, [](int rank) {
    torch::nn::Linear linear(4, 7);
    FullyShardedDataParallel<torch::nn::Linear> model(linear);
    torch::optim::Adam optimizer(linear->parameters());
    model(torch::ones({2, 4})).sum().backward();
    optimizer.step();
    const std::int64_t first = 3 * rank, rows = rank < 2 ? 3 : 1;
    const auto expect_rows = [&](const CheckpointItem& item, const shards::Box& box) {
      EXPECT_EQ(item.boxes, std::vector{box}) << item.name;
      EXPECT_EQ(item.tensor.sizes(), box.sizes) << item.name;
    };
    const at::Tensor &weight = linear->weight, &bias = linear->bias;
    const auto& state = static_cast<torch::optim::AdamParamState&>(
        *optimizer.state().at(weight.unsafeGetTensorImpl()));
    expect_rows(parameter_item("weight", weight), {{first, 0}, {rows, 4}});
    expect_rows(parameter_item("bias", bias), {{first}, {rows}});
    expect_rows(state_item("exp_avg", state.exp_avg(), weight), {{first, 0}, {rows, 4}});
    EXPECT_EQ(whole_sizes(weight), (shards::Extent{7, 4}));
  });
}

// spec: S2 after loading on another number of ranks, training goes on as it would have
TEST(CheckpointState, TrainingGoesOn) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string middle = folder.path() + "/middle";
  const auto weights = [](Adam& trained) {
    if (!trained.fsdp) return testing::flat(trained.net->parameters()).clone();
    const auto whole = trained.fsdp->summon_full_params(false);
    return testing::flat(trained.net->parameters()).clone();
  };
  const torch::optim::AdamOptions options = torch::optim::AdamOptions(0.05).eps(1e-3);
  at::Tensor expected;
  on_ranks(4, [&](int rank) {
    Adam trained(Wrap::fsdp, false, options);
    for (int step = 0; step < 3; ++step) trained.step(step);
    save(trained.state(), middle);
    for (int step = 3; step < 6; ++step) trained.step(step);
    const auto all = weights(trained);
    if (rank == 0) expected = all;
  });
  for (const Way& way : kWays)
    on_ranks(way.ranks, [&](int) {
      Adam trained(way.wrap, way.zero, options);
      auto state = trained.state();
      load(state, middle);
      for (int step = 3; step < 6; ++step) trained.step(step);
      EXPECT_TRUE(torch::allclose(weights(trained), expected, 1e-4, 1e-6));
    });
}

template <class Optimizer, class Options>
void expect_same_after(const Options& options) {
  const TemporaryFolder folder("muster-checkpoint-");
  Trained<Optimizer, Options> one(Wrap::plain, false, options), other(Wrap::plain, false, options);
  for (int step = 0; step < 3; ++step) one.step(step);
  save(one.state(), folder.path() + "/c");
  auto state = other.state();
  load(state, folder.path() + "/c");
  one.step(3);
  other.step(3);
  EXPECT_SAME(testing::flat(one.net->parameters()), testing::flat(other.net->parameters()));
}

// spec: S1 optimizers: each of torch's, with all that it remembers, in one process without a group
TEST(CheckpointState, EachOptimizerGoesOn) {
  using namespace torch::optim;
  expect_same_after<torch::optim::Adam>(AdamOptions(0.1));
  expect_same_after<AdamW>(AdamWOptions(0.1).amsgrad(true));
  expect_same_after<SGD>(SGDOptions(0.1).momentum(0.9));
  expect_same_after<Adagrad>(AdagradOptions(0.1));
  expect_same_after<RMSprop>(RMSpropOptions(0.1).momentum(0.5).centered(true));
}

// spec: S1 samplers, random state, values, tensors of any kind; parts of a tensor
TEST(CheckpointState, ValuesSamplersAndRandomStatesComeBack) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  std::array<at::Tensor, 2> drawn;
  const auto complex = torch::arange(6, torch::kDouble).view({2, 3}).to(at::kComplexDouble);
  on_ranks(2, [&](int rank) {
    std::int64_t count = 7;
    double loss = 0.25;
    bool done = true;
    std::string name = "run \"1\"";
    DistributedSampler sampler(100);
    sampler.set_epoch(4);
    at::Generator random = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank + 1));
    const auto columns = complex.slice(1, rank == 0 ? 0 : 2, rank == 0 ? 2 : 3);
    State state;
    state.add_value("count", count).add_value("loss", loss).add_value("done", done);
    state.add_value("name", name).add_sampler("sampler", sampler).add_random("random", random);
    state.add_box("complex", columns, {2, 3}, {0, rank == 0 ? 0 : 2});
    state.add_tensor("strided", torch::arange(12).view({3, 4}).t());
    save(state, path, {.step = 5});
    drawn[static_cast<std::size_t>(rank)] = at::rand({4}, random);
    count = 0, loss = 0, done = false, name = "";
    sampler.set_epoch(0);
    load(state, path);
    EXPECT_EQ(count, 7);
    EXPECT_EQ(loss, 0.25);
    EXPECT_TRUE(done);
    EXPECT_EQ(name, "run \"1\"");
    EXPECT_EQ(sampler.epoch(), 4u);
    EXPECT_SAME(at::rand({4}, random), drawn[static_cast<std::size_t>(rank)]);
  });
  EXPECT_EQ(shards::open_index(path)->step, 5);
  const auto whole = at::zeros({2, 3}, at::kComplexDouble);
  const auto strided = at::zeros({3, 4}, at::kLong).t();
  const auto cast = at::zeros({4, 3}, at::kFloat);
  State state;
  state.add_tensor("complex", whole).add_tensor("strided", strided);
  load(state, path);
  EXPECT_SAME(whole, complex);
  EXPECT_SAME(strided, torch::arange(12).view({3, 4}).t());
  State other;
  other.add_tensor("strided", cast);
  load(other, path);
  EXPECT_SAME(cast, torch::arange(12).view({3, 4}).t().to(at::kFloat));
}

// spec: S1 values: numbers that JSON has no form for come back; text that it cannot hold is named
TEST(CheckpointState, ValuesThatJsonLacks) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double best = kInfinity, worst = -kInfinity, loss = std::numeric_limits<double>::quiet_NaN();
  State state;
  state.add_value("best", best).add_value("worst", worst).add_value("loss", loss);
  save(state, path);
  EXPECT_HAS(shards::open_index(path)->values, R"("best":{"__muster__":"float","of":"inf"})");
  best = worst = loss = 0;
  load(state, path);
  EXPECT_EQ(best, kInfinity);
  EXPECT_EQ(worst, -kInfinity);
  EXPECT_TRUE(std::isnan(loss));
  std::string name = "caf\xe9";
  State other;
  other.add_value("note", name);
  EXPECT_HAS(testing::message_of<DistError>([&] { save(other, path); }), "'note'");
}

// spec: S1 optimizers: options that JSON has no number for come back; of another type, they are
// named
TEST(CheckpointState, OptionsThatJsonLacks) {
  const TemporaryFolder folder("muster-checkpoint-");
  const auto optimizer_of = [](torch::nn::LinearImpl& net, double decay) {
    return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(0.1).weight_decay(decay));
  };
  Linear net(2, 2);
  auto saved = optimizer_of(*net, std::numeric_limits<double>::infinity());
  State state;
  state.add_optimizer("optimizer", saved, *net);
  save(state, folder.path() + "/c");
  auto loaded = optimizer_of(*net, 0);
  State other;
  other.add_optimizer("optimizer", loaded, *net);
  load(other, folder.path() + "/c");
  const auto& options = static_cast<torch::optim::SGDOptions&>(loaded.param_groups()[0].options());
  EXPECT_EQ(options.weight_decay(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(options.lr(), 0.1);
}

// spec: S4 ranks that open different checkpoints are told so, all of them, before anything is
// filled
TEST(CheckpointState, RanksLoadTheSameCheckpoint) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string old = folder.path() + "/old", fresh = folder.path() + "/new";
  on_ranks(3, [&](int rank) {
    const auto tensor = at::zeros({4});
    State state;
    state.add_tensor("t", tensor);
    save(state, old);
    tensor.fill_(1);
    save(state, fresh);
    tensor.fill_(2);
    EXPECT_HAS(testing::message_of<DistError>([&] { load(state, rank == 2 ? old : fresh); }),
               "rank 2 has opened another checkpoint");
    EXPECT_TRUE(tensor.eq(2).all().item<bool>());
    load(state, fresh);
    EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  });
}

// spec: S5.content the program may change everything when async_save returns; the next save waits
// for it
TEST(CheckpointState, AnAsynchronousSaveHasWhatWasThere) {
  const TemporaryFolder folder("muster-checkpoint-");
  on_ranks(3, [&](int) {
    const auto tensor = at::zeros({1000});
    State state;
    state.add_tensor("t", tensor);
    std::vector<Saving> savings;
    for (int round = 0; round < 4; ++round) {
      tensor.fill_(round);
      savings.push_back(async_save(state, folder.path() + "/" + std::to_string(round)));
      tensor.fill_(-1);
    }
    for (Saving& each : savings) each.wait();
    EXPECT_TRUE(savings.back().done());
    for (int round = 0; round < 4; ++round) {
      load(state, folder.path() + "/" + std::to_string(round));
      EXPECT_TRUE(tensor.eq(round).all().item<bool>());
    }
  });
  EXPECT_EQ(latest(folder.path()), folder.path() + "/3");
  EXPECT_FALSE(latest(folder.path() + "/3"));
}

// spec: S1 an optimizer of another class, or with other groups or parameters, is refused in words,
// and neither it nor the module is changed
TEST(CheckpointState, RefusesTheStateOfOtherOptimizers) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  Sequential net = make_net();
  torch::optim::Adam saved(net->parameters(), torch::optim::AdamOptions(0.1));
  net->forward(at::ones({4, 5})).sum().backward();
  saved.step();
  State whole;
  whole.add_module("model", *net).add_optimizer("optimizer", saved, *net);
  save(whole, path);

  const auto refusal_of = [&](torch::optim::Optimizer& optimizer, Sequential& of) {
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : of->parameters()) before.push_back(parameter.clone());
    State state;
    state.add_module("model", *of).add_optimizer("optimizer", optimizer, *of);
    const std::string why = testing::message_of<DistError>([&] { load(state, path); });
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(at::equal(of->parameters()[i], before[i])) << why;
    EXPECT_TRUE(optimizer.state().empty()) << why;
    return why;
  };
  Sequential other = make_net(2);
  torch::optim::SGD sgd(other->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_HAS(refusal_of(sgd, other), "is of the class SGD");
  EXPECT_HAS(refusal_of(sgd, other), "Adam");
  torch::optim::AdamW adamw(other->parameters());
  EXPECT_HAS(refusal_of(adamw, other), "is of the class AdamW");

  auto parameters = other->parameters();
  const std::vector<at::Tensor> first(parameters.begin(), parameters.begin() + 2),
      rest(parameters.begin() + 2, parameters.end());
  torch::optim::Adam groups(std::vector<torch::optim::OptimizerParamGroup>{
      torch::optim::OptimizerParamGroup(first), torch::optim::OptimizerParamGroup(rest)});
  EXPECT_HAS(refusal_of(groups, other), "has 2 parameter groups, and 1 were saved");
  torch::optim::Adam fewer(first);
  EXPECT_HAS(refusal_of(fewer, other), "which were not saved in it");

  Sequential wider(Linear(5, 8), torch::nn::BatchNorm1d(8), Linear(8, 3));
  torch::optim::Adam of_wider(wider->parameters());
  EXPECT_HAS(refusal_of(of_wider, wider), "sizes");

  torch::optim::Adam same(other->parameters());
  State state;
  state.add_module("model", *other).add_optimizer("optimizer", same, *other);
  load(state, path);
  EXPECT_FALSE(same.state().empty());
}

// spec: S5 the thread that writes takes no signal of the program's
TEST(CheckpointState, TheThreadThatWritesBlocksSignals) {
  const TemporaryFolder folder("muster-checkpoint-");
  on_ranks(2, [&](int rank) {
    std::atomic<int> calls = 0, with_signals = 0;
    auto behind = ranks_of(new_group());
    behind.exchange = [&, exchange = behind.exchange](const std::string& mine,
                                                      shards::ExchangeLimit limit) {
      sigset_t now;
      pthread_sigmask(SIG_SETMASK, nullptr, &now);
      for (const int each : {SIGTERM, SIGINT, SIGALRM, SIGUSR1, SIGCHLD})
        with_signals += sigismember(&now, each) == 0;
      ++calls;
      return exchange(mine, limit);
    };
    const auto tensor = at::arange(4);
    Saver saver(ranks_of(default_group()), behind);
    saver
        .async_save({box_item("t", tensor, {8}, {4 * rank})}, "{}",
                    {.path = folder.path() + "/c", .durable = false})
        .wait();
    EXPECT_GT(calls.load(), 0);
    EXPECT_EQ(with_signals.load(), 0);
  });
}

// spec: S5 S4 a rank that gets no thread for the save says so on all ranks, which go on
TEST(CheckpointState, ARefusedThreadFailsTheSaveOnAllRanks) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  on_ranks(2, [&](int) {
    const auto tensor = at::arange(4);
    State state;
    state.add_tensor("t", tensor);
    async_save(state, path).wait();
    barrier();
    {
      const NoNewThreads refused;
      auto saving = async_save(state, path);
      EXPECT_HAS(testing::message_of<DistError>([&] { saving.wait(); }),
                 "cannot start the thread that writes a checkpoint");
    }
    barrier();
    async_save(state, path).wait();
    load(state, path);
  });
}

// spec: S4 what one rank cannot save or load fails on all, naming it, and the group goes on
TEST(CheckpointState, AFailureOfOneRankIsEverybodys) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  on_ranks(3, [&](int rank) {
    const auto tensor = at::ones({4});
    State good, bad;
    good.add_tensor("t", tensor);
    if (rank == 1)
      bad.add_tensor("t", tensor.to_sparse());
    else
      bad.add_tensor("t", tensor);
    EXPECT_HAS(testing::message_of<DistError>([&] { save(bad, path); }), "is not dense");
    EXPECT_HAS(testing::message_of<DistError>([&] { auto saving = async_save(bad, path); }),
               "is not dense");
    save(good, path);
    State more;
    more.add_tensor("t", tensor);
    if (rank == 2) more.add_tensor("missing", tensor.clone());
    EXPECT_HAS(testing::message_of<DistError>([&] { load(more, path); }), "'missing'");
    load(good, path);
    const std::string file = folder.path() + "/c/not/a/place";
    EXPECT_HAS(testing::message_of<DistError>([&] { load(good, file); }), "is not there");
  });
}

// spec: S1 states whose description is larger than one text of the group (16 MiB)
TEST(CheckpointState, HasALongDescription) {
  constexpr std::int64_t count = 20'000;
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  const std::string prefix(1000, 'x');
  const auto name_of = [&](std::int64_t i) { return prefix + std::to_string(i); };
  on_ranks(2, [&](int rank) {
    const auto memory = at::arange(count, at::kInt).mul_(2).add_(rank);
    const auto* const numbers = memory.const_data_ptr<int>();
    std::vector<CheckpointItem> items;
    for (std::int64_t i = 0; i < count; ++i)
      items.push_back(box_item(name_of(i), memory.narrow(0, i, 1), {2}, {rank}));
    saver_of(default_group())->save(items, "{}", {.path = path, .durable = false});
    auto index = shards::open_index(path);
    ASSERT_TRUE(index.ok()) << index.status().message();
    ASSERT_EQ(index->tensors.size(), static_cast<std::size_t>(count));
    memory.fill_(-1);
    load_items(*index, items, ranks_of(default_group()));
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(numbers[i], 2 * i + rank);
  });
}

// spec: S1 writing may take longer than the group's timeout, which holds until all have come
TEST(CheckpointState, WritingHasNoTimeout) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  on_ranks(2, [&](int rank) {
    const Group group = new_group();
    const auto ranks = ranks_of(group);
    const auto tensor = at::arange(4);
    const auto item = box_item("t", tensor, {8}, {4 * rank});
    const shards::CommitOptions options{.path = path, .durable = false};
    const auto plan = shards::plan_save({shard_of(item)}, options, ranks);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    group->set_timeout(Duration(1));
    const auto* const bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
    const Status saved = shards::finish_save(*plan, {bytes}, "{}", ranks);
    EXPECT_TRUE(saved.ok()) << saved.message();
    auto index = shards::open_index(path);
    ASSERT_TRUE(index.ok()) << index.status().message();
    EXPECT_NO_THROW(load_items(*index, {item}, ranks));
    barrier();
    if (rank == 0) {
      const auto alone = shards::plan_save({shard_of(item)}, options, ranks);
      EXPECT_EQ(alone.status().code(), Code::timed_out) << alone.status().message();
    }
    barrier();
    abort_process_group(group, "rank 1 did not take part in the last save");
  });
}

// spec: S3 a folder of safetensors files without an index is read where that is asked for
TEST(CheckpointState, ReadsSafetensorsOfOthers) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = folder.path() + "/c";
  std::int64_t step = 3;
  const auto tensor = at::arange(10, at::kHalf);
  State state;
  state.add_tensor("t", tensor).add_value("step", step);
  save(state, path);
  ASSERT_EQ(::unlink((path + "/muster.json").c_str()), 0);
  tensor.zero_();
  EXPECT_HAS(testing::message_of<DistError>([&] { load(state, path); }), "no checkpoint");
  step = 9;
  load(state, path, {.safetensors = true});
  EXPECT_SAME(tensor, at::arange(10, at::kHalf));
  EXPECT_EQ(step, 9);
}

}  // namespace
}  // namespace muster::checkpoint
