// SPDX-License-Identifier: BSD-3-Clause
// LocalSgd and DiLoCo, on ranks as threads, beside the same algorithms computed by one process.
#include "muster/local_sgd.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/group/testing/compress_within_host.h"
#include "core/group/testing/ranks.h"
#include "muster/debug.h"
#include "muster/device_mesh.h"
#include "muster/distributed_data_parallel.h"
#include "muster/fully_sharded_data_parallel.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;
using Fragments = std::vector<Tensors>;

void fill(const nn::Sequential& net, int salt) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters())
    parameter.copy_(
        (torch::sin(torch::arange(parameter.numel(), at::kDouble) * 12.9898 + ++salt) * 0.5)
            .view(parameter.sizes()));
}
nn::Sequential net_of(int salt, at::ScalarType dtype = at::kDouble) {
  nn::Sequential net(nn::Linear(4, 9), nn::Tanh(), nn::Linear(9, 9), nn::Tanh(), nn::Linear(9, 1));
  net->to(dtype);
  fill(net, salt);
  return net;
}
/// A replica's data of a step.
at::Tensor batch(int replica, int step, at::ScalarType dtype = at::kDouble) {
  return torch::sin(torch::arange(8 * 4, at::kDouble) * (0.31 + 0.17 * replica + 0.011 * step))
      .view({8, 4})
      .to(dtype);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& x) {
  return (output - x.sum(1, true)).square().mean();
}
void train(nn::Sequential net, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  loss_of(net->forward(x), x).backward();
  optimizer.step();
}

bool is_same_everywhere(const at::Tensor& mine) {
  auto all = torch::empty({get_world_size() * mine.numel()}, mine.options());
  all_gather_into_tensor(all, mine);
  for (const at::Tensor& each : all.chunk(get_world_size()))
    if (!same_bytes(each, mine)) return false;
  return true;
}

/// Streaming DiLoCo of `replicas` as the papers have it, in this process: the parameters of each
/// replica after `steps`. Nesterov momentum as in torch.
struct Reference {
  int replicas = 3, steps = 40, fragments = 1;
  std::int64_t sync_every = 6, delay = 0;
  double mix = 0, rate = 0.7, momentum = 0.9;

  Tensors run() const {
    std::vector<nn::Sequential> nets;
    std::vector<torch::optim::SGD> optimizers;
    std::vector<Fragments> parts;
    for (int replica = 0; replica < replicas; ++replica) {
      nets.push_back(net_of(1));
      optimizers.emplace_back(nets.back()->parameters(), torch::optim::SGDOptions(0.05));
      parts.push_back(fragments_of(*nets.back(), fragments));
    }
    Fragments outer(static_cast<std::size_t>(fragments)), velocity = outer, average = outer;
    for (std::size_t f = 0; f < outer.size(); ++f)
      for (const at::Tensor& each : parts[0][f]) {
        outer[f].push_back(each.detach().clone());
        velocity[f].push_back(torch::zeros_like(outer[f].back()));
      }
    std::vector<std::int64_t> due(outer.size(), -1);
    const at::NoGradGuard no_grad;
    for (int step = 1; step <= steps; ++step) {
      for (std::size_t r = 0; r < nets.size(); ++r) {
        const at::AutoGradMode with_grad(true);
        train(nets[r], optimizers[r], batch(static_cast<int>(r), step));
      }
      const auto take = [&](std::size_t f) {
        due[f] = -1;
        for (std::size_t i = 0; i < outer[f].size(); ++i) {
          const at::Tensor& g = average[f][i];
          velocity[f][i] = velocity[f][i] * momentum + g;
          outer[f][i] = outer[f][i] - rate * (g + momentum * velocity[f][i]);
          for (auto& part : parts) part[f][i].copy_(part[f][i] * mix + outer[f][i] * (1 - mix));
        }
      };
      for (std::size_t f = 0; f < outer.size(); ++f)
        if (due[f] == step) take(f);
      for (std::size_t f = 0; f < outer.size(); ++f) {
        const auto turn = static_cast<std::int64_t>(f + 1) * sync_every / fragments;
        if (step % sync_every != turn % sync_every) continue;
        average[f].clear();
        for (std::size_t i = 0; i < outer[f].size(); ++i) {
          at::Tensor sum = torch::zeros_like(outer[f][i]);
          for (auto& part : parts) sum += outer[f][i] - part[f][i];
          average[f].push_back(sum / replicas);
        }
        due[f] = step + delay;
        if (delay == 0) take(f);
      }
    }
    Tensors results;
    for (const auto& net : nets) results.push_back(flat(net->parameters()));
    return results;
  }
  DiLoCoOptions options() const { return {.sync_every = sync_every, .delay = delay, .mix = mix}; }
};

// spec: X2 LocalSgd: the average of all replicas every sync_every steps, from the first one's
// values
TEST(LocalSgd, AveragesEverySoManySteps) {
  on_ranks(3, [](int rank) {
    auto parameter = torch::full({5}, 100.0 * rank, at::kDouble).requires_grad_();
    LocalSgd local(Tensors{parameter}, {.sync_every = 4});
    const at::NoGradGuard no_grad;
    EXPECT_SAME(parameter, torch::zeros({5}, at::kDouble));  // those of rank 0
    for (int step = 1; step <= 8; ++step) {
      parameter += rank;
      local.step();
      if (step % 4 != 0) {
        EXPECT_NEAR(parameter[0].item<double>(), step / 4 * 4 + step % 4 * rank, 1e-12);
      } else {
        EXPECT_NEAR(parameter[0].item<double>(), step, 1e-12);  // the mean rank is 1
        EXPECT_TRUE(is_same_everywhere(parameter.detach()));
      }
    }
    EXPECT_EQ(local.meetings(), 2);
    EXPECT_EQ(local.steps(), 8);
  });
}

// spec: X2 DiLoCo, streaming by fragments, with delay and mixing: the weights of the algorithm
// computed by one process
TEST(DiLoCo, ComputesWhatThePapersSay) {
  const std::vector<Reference> cases{
      {},
      {.fragments = 3},
      {.delay = 4},
      {.fragments = 3, .sync_every = 7, .delay = 2, .mix = 0.5},
      {.replicas = 2, .steps = 30, .fragments = 2, .sync_every = 5, .delay = 4, .mix = 0.25},
  };
  for (const Reference& each : cases) {
    const Tensors expected = each.run();
    on_ranks(each.replicas, [&](int rank) {
      auto net = net_of(1 + rank);  // rank 0's values are taken
      DiLoCo diloco(fragments_of(*net, each.fragments), each.options());
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
      for (int step = 1; step <= each.steps; ++step) {
        train(net, optimizer, batch(rank, step));
        diloco.step();
      }
      const auto mine = flat(net->parameters());
      EXPECT_LT((mine - expected[static_cast<std::size_t>(rank)]).abs().max().item<double>(), 1e-12)
          << each.fragments << " fragments, delay " << each.delay << ", mix " << each.mix;
      EXPECT_TRUE(is_same_everywhere(flat(diloco.outer_parameters())));
    });
  }
}

/// float32 training of two replicas; the parameters and the outer ones of this rank.
std::pair<at::Tensor, at::Tensor> trained(int rank, const DiLoCoOptions& options, int steps) {
  auto net = net_of(1, at::kFloat);
  DiLoCo diloco(fragments_of(*net, 2), options);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  for (int step = 1; step <= steps; ++step) {
    train(net, optimizer, batch(rank, step, at::kFloat));
    diloco.step();
  }
  return {flat(net->parameters()), flat(diloco.outer_parameters())};
}

// spec: X2 compression with error feedback: all replicas keep the same outer bits; a meeting moves
// the outer parameters to within the stated error of where it moves them without
TEST(DiLoCo, CompressedMeetingsKeepTheSameBits) {
  // The largest change of a replica when the first fragment meets.
  double largest = 0;
  for (const int replica : {0, 1}) {
    auto net = net_of(1, at::kFloat);
    const auto before = flat(net->parameters()).clone();
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    for (const int step : {1, 2}) train(net, optimizer, batch(replica, step, at::kFloat));
    largest = std::max(largest, (flat(net->parameters()) - before).abs().max().item<double>());
  }
  on_ranks(2, [&](int rank) {
    const auto outer_after = [&](int steps, Compression compression, std::int64_t delay = 0) {
      const auto outer =
          trained(rank, {.sync_every = 4, .delay = delay, .compression = compression}, steps)
              .second;
      EXPECT_TRUE(is_same_everywhere(outer));
      return outer;
    };
    const auto plain = outer_after(2, Compression::none);
    for (const auto compression : {Compression::bf16, Compression::int8, Compression::int4}) {
      const double step = compression == Compression::int4   ? 1 / 13.9
                          : compression == Compression::int8 ? 1 / 252.0
                                                             : 1 / 256.0;
      const auto off = (outer_after(2, compression) - plain).abs().max().item<double>();
      EXPECT_GT(off, 0);
      // An average has two hops, the second with the error of the first. The outer optimizer's
      // first step is 0.7 of it and, by Nesterov's momentum, 0.9 of that again. Float32 rounds
      // parameters of up to 0.5.
      EXPECT_LE(off, 0.7 * 1.9 * (2 + step) * step * largest + 1e-7);
      outer_after(40, compression);
      outer_after(40, compression, 3);
    }
  });
}

// spec: X2 error feedback: changes smaller than a step of int4 arrive over many meetings; without
// it they are lost
TEST(LocalSgd, ErrorFeedbackKeepsSmallChanges) {
  constexpr int kMeetings = 200;
  on_ranks(2, [](int) {
    auto change = torch::full({256}, 0.02);
    for (const int first : {0, 128}) change[first] = 1;  // of a block: its step is about 1/7
    const auto off = [&](bool feedback, std::int64_t every) {
      auto parameter = torch::zeros({256});
      LocalSgd local(
          Tensors{parameter},
          {.sync_every = every, .compression = Compression::int4, .error_feedback = feedback});
      for (int step = 0; step < kMeetings * every; ++step) {
        parameter += change / static_cast<double>(every);
        local.step();
      }
      return (parameter - change * kMeetings).abs().max().item<double>();
    };
    for (const std::int64_t every : {1, 4}) {
      // The mean of the ranks' rests is not there yet: at most a hop's error of one rank's
      // change of about 1, and one of the sum of about 2.
      EXPECT_LT(off(true, every), (1.1 + 2.2) / 13.9 / 2 + 0.01);
      EXPECT_GT(off(false, every), 0.9 * 0.02 * kMeetings);
    }
  });
}

// spec: X2 state: a run that is saved, with a meeting on its way, and goes on in new objects has
// the bits of one that never stopped
TEST(DiLoCo, GoesOnFromItsState) {
  on_ranks(2, [](int rank) {
    const DiLoCoOptions options{
        .sync_every = 6, .delay = 3, .mix = 0.5, .compression = Compression::int8};
    const auto expected = trained(rank, options, 30);
    auto net = net_of(1, at::kFloat);
    auto diloco = std::make_unique<DiLoCo>(fragments_of(*net, 2), options);
    auto optimizer =
        std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
    for (int step = 1; step <= 30; ++step) {
      train(net, *optimizer, batch(rank, step, at::kFloat));
      diloco->step();
      if (step != 13) continue;  // fragment 1 has met in step 12
      const auto state = diloco->state_dict();
      std::stringstream outer, inner;
      torch::save(diloco->outer_optimizer(), outer);
      torch::save(*optimizer, inner);
      auto copy = net_of(7, at::kFloat);
      diloco = std::make_unique<DiLoCo>(fragments_of(*copy, 2), options);
      {
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < net->parameters().size(); ++i)
          copy->parameters()[i].copy_(net->parameters()[i]);
      }
      net = copy;
      diloco->load_state_dict(state);
      torch::load(diloco->outer_optimizer(), outer);
      optimizer =
          std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
      torch::load(*optimizer, inner);
    }
    EXPECT_TRUE(same_bytes(flat(net->parameters()), expected.first));
    EXPECT_TRUE(same_bytes(flat(diloco->outer_parameters()), expected.second));
    EXPECT_HAS(message_of<DistError>([&] { diloco->load_state_dict({}); }), "lacks");
  });
}

// spec: X2 state: one of other options or parameters is refused by name, and changes nothing
TEST(DiLoCo, RefusesAStateOfOtherOptions) {
  on_ranks(1, [](int) {
    const DiLoCoOptions options{
        .sync_every = 6, .delay = 3, .mix = 0.5, .compression = Compression::int8};
    const auto made = [](DiLoCoOptions with, at::ScalarType dtype = at::kFloat) {
      return std::make_unique<DiLoCo>(
          Fragments{{torch::zeros({3}, dtype)}, {torch::zeros({2}, dtype)}}, with);
    };
    auto one = made(options);
    const auto before = one->state_dict();
    const auto says = [&](const DiLoCoOptions& with, at::ScalarType dtype = at::kFloat) {
      auto other = made(with, dtype);
      for (int step = 0; step < 4; ++step) other->step();
      const auto state = other->state_dict();
      return message_of<DistError>([&] { one->load_state_dict(state); });
    };
    auto longer = options, later = options, finer = options, wide = options;
    longer.sync_every = 12;
    later.delay = 1;
    finer.compression = Compression::bf16;
    wide.compression = Compression::none;
    EXPECT_HAS(says(longer), "saved with sync_every 12, and this has 6");
    EXPECT_HAS(says(later), "saved with delay 1, and this has 3");
    EXPECT_HAS(says(finer), "saved with compression");
    EXPECT_HAS(says(wide, at::kDouble), "another dtype for 'outer.0'");
    DiLoCo whole(Tensors{torch::zeros({3}), torch::zeros({2})}, wide);
    EXPECT_HAS(message_of<DistError>([&] { whole.load_state_dict(made(wide)->state_dict()); }),
               "saved with fragments 2, and this has 1");
    auto lacking = made(options)->state_dict();
    std::erase_if(lacking, [](const auto& each) { return each.first == "fragment.1.rests.0"; });
    EXPECT_HAS(message_of<DistError>([&] { one->load_state_dict(lacking); }),
               "lacks 'fragment.1.rests.0'");
    const auto after = one->state_dict();
    ASSERT_EQ(after.size(), before.size());
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_SAME(after[i].second, before[i].second);
  });
}

// spec: X3.hash, X2 outer parameters are compared at every meeting: all ranks name the rank and the
// tensor that differ, nothing changes, and a state of one of them mends it
TEST(DiLoCo, NamesTheOuterParameterThatDiffers) {
  for (const std::int64_t delay : {0, 2})
    on_ranks(3, [delay](int rank) {
      const Tensors parameters{torch::zeros({2}), torch::zeros({3}), torch::zeros({4})};
      DiLoCo diloco(parameters, {.sync_every = 3, .delay = delay});
      const auto state = diloco.state_dict();
      const auto steps = [&](std::int64_t count) {
        for (std::int64_t step = 0; step < count; ++step) diloco.step();
      };
      if (rank == 2) diloco.outer_parameters()[1][0] = 1e-30;
      const auto said = message_of<DistError>([&] { steps(3 + delay); });
      EXPECT_HAS(said, "rank 2");
      EXPECT_HAS(said, "number 1 of sizes [3]");
      EXPECT_EQ(diloco.meetings(), 0);
      EXPECT_SAME(parameters[0], torch::zeros({2}));
      diloco.load_state_dict(state);
      steps(3 + delay);
      EXPECT_EQ(diloco.meetings(), 1);
    });
}

// spec: X2 a meeting that fails is not taken later: the replica keeps its values, and a state that
// is saved then has no meeting on its way and can be loaded
TEST(DiLoCo, AMeetingThatFailedIsNotTaken) {
  on_ranks(2, [](int rank) {
    const Group group = new_group({.ranks = {0, 1}}), other = new_group({.ranks = {0, 1}});
    at::Tensor parameter = torch::zeros({3});
    const DiLoCoOptions options{.group = group, .sync_every = 2, .delay = 1};
    DiLoCo diloco(Tensors{parameter}, options);
    diloco.step();
    parameter += 1;
    barrier();  // the other rank may be within the constructor
    if (rank == 1) abort_process_group(group);
    try {
      if (rank == 0) diloco.step();
    } catch (const DistError&) {  // the abort came first
    }
    barrier();
    const auto state = diloco.state_dict();
    for (const auto& [name, value] : state) {
      if (name == "fragment.0.due") EXPECT_EQ(value.item<std::int64_t>(), -1);
      EXPECT_FALSE(name.starts_with("fragment.0.average"));
    }
    if (rank == 0) diloco.step();  // that in which the average would have been taken
    EXPECT_EQ(diloco.meetings(), 0);
    EXPECT_SAME(parameter, torch::ones({3}));
    DiLoCoOptions anew = options;
    anew.group = other;
    DiLoCo(Tensors{parameter}, anew).load_state_dict(state);
  });
}

// spec: X2 the failure of a meeting says that it is one
TEST(DiLoCo, AMeetingThatFailedIsNamed) {
  on_ranks(2, [](int rank) {
    const Group group = new_group({.ranks = {0, 1}});
    DiLoCo diloco(Tensors{torch::zeros({3})}, {.group = group, .sync_every = 1});
    barrier();  // the other rank may be within the last call of the constructor
    if (rank == 1) abort_process_group(group);
    if (rank == 0)
      EXPECT_HAS(message_of<DistError>([&] { diloco.step(); }),
                 "DiLoCo: meeting 1 has failed, and this replica keeps its own values: ");
    barrier();
  });
}

// spec: X2 an outer optimizer that throws in the meeting of one fragment: nothing of that is taken
// in the meeting of another
TEST(DiLoCo, AnUpdateThatThrowsLeavesNoGradients) {
  on_ranks(2, [](int rank) {
    const Tensors first{torch::zeros({2}, at::kDouble)}, second{torch::zeros({3}, at::kDouble)};
    parallel::ReplicaMeetings meetings({first, second}, {.name = "DiLoCo",
                                                         .group = nullptr,
                                                         .sync_every = 2,
                                                         .delay = 0,
                                                         .sync_period = {},
                                                         .by_tokens = false,
                                                         .mix = 0,
                                                         .compression = Compression::none,
                                                         .error_feedback = false});
    bool fails = true;
    meetings.set_update([&] {
      if (std::exchange(fails, false)) throw std::runtime_error("not now");
      for (const at::Tensor& outer : meetings.outer_parameters())
        if (outer.grad().defined()) outer.sub_(outer.grad());
    });
    for (const Tensors& each : {first, second}) each[0].add_(rank + 1);
    EXPECT_THROW(meetings.step(1), std::runtime_error);
    for (const auto& [name, value] : meetings.state_dict())
      EXPECT_FALSE(name.starts_with("fragment.0.average"));
    meetings.step(1);
    EXPECT_SAME(second[0], torch::full({3}, 1.5, at::kDouble));
    EXPECT_SAME(first[0], torch::full({2}, 1.0 + rank, at::kDouble));
    EXPECT_SAME(meetings.outer_parameters()[0], torch::zeros({2}, at::kDouble));
  });
}

// spec: X2 a replica that ends during a meeting does not wait for those that are late, and the
// meeting goes on for them
TEST(DiLoCo, EndsDuringAMeeting) {
  on_ranks(2, [](int rank) {
    const Group group = new_group({.ranks = {0, 1}});
    const Tensors parameters{torch::full({300}, 1.0 + rank)};
    auto diloco = std::make_unique<DiLoCo>(
        parameters,
        DiLoCoOptions{
            .group = group, .sync_every = 2, .delay = 1, .compression = Compression::int8});
    const auto meet = [&] {
      for (int i = 0; i < 2; ++i) diloco->step();
    };
    if (rank == 0) {
      meet();
      diloco.reset();
    }
    barrier();  // before rank 1 comes to it
    if (rank == 1) {
      meet();
      diloco->step();
      EXPECT_EQ(diloco->meetings(), 1);
    }
    barrier();
  });
}

// spec: X2 parameters that are given other memory meet with what is there then; with other sizes
// all ranks throw, name the rank and the parameter, and change nothing
TEST(LocalSgd, FollowsParametersToOtherMemory) {
  on_ranks(2, [](int rank) {
    const auto zeros = torch::zeros({3}), values = torch::full({3}, 2.0 * rank);
    auto first = torch::zeros({2}), parameter = torch::zeros({3}).requires_grad_();
    LocalSgd local(Tensors{first, parameter}, {.sync_every = 1});
    parameter.set_data(values);
    local.step();
    EXPECT_SAME(parameter.detach(), torch::ones({3}));
    EXPECT_SAME(values, torch::ones({3}));
    if (rank == 1) parameter.set_data(torch::zeros({4}));
    const auto said = message_of<DistError>([&] { local.step(); });
    EXPECT_HAS(said, "parameter number 1 of rank 1");
    EXPECT_HAS(said, "[3]");
    EXPECT_EQ(local.meetings(), 1);
    EXPECT_SAME(first, torch::zeros({2}));
    if (rank == 1) parameter.set_data(zeros);
    local.step();
    EXPECT_EQ(local.meetings(), 2);
    EXPECT_SAME(parameter.detach(), torch::full({3}, 0.5));
  });
}

// spec: X2 any outer optimizer; float16 parameters have float32 outer ones
TEST(DiLoCo, TakesAnyOuterOptimizer) {
  on_ranks(2, [](int rank) {
    auto parameter = torch::zeros({3}, at::kHalf).requires_grad_();
    const auto half_rate = [](Tensors outer) {
      return std::make_unique<torch::optim::SGD>(std::move(outer), torch::optim::SGDOptions(0.5));
    };
    DiLoCo diloco(Tensors{parameter}, {.sync_every = 1, .outer_optimizer = half_rate});
    const at::NoGradGuard no_grad;
    parameter += 1 + 2 * rank;
    diloco.step();
    EXPECT_SAME(parameter, torch::ones({3}, at::kHalf));  // half of the mean of 1 and 3
    EXPECT_EQ(diloco.outer_parameters()[0].scalar_type(), at::kFloat);
  });
}

// spec: X2 around FSDP and DDP replicas: the weights of replicas of one rank
TEST(DiLoCo, MeetsAroundShardedAndCopiedReplicas) {
  const Reference reference{.replicas = 2, .steps = 20, .sync_every = 5};
  const Tensors expected = reference.run();
  for (const bool sharded : {true, false})
    on_ranks(4, [&](int rank) {
      const auto mesh = init_device_mesh("cpu", {2, 2});
      const int replica = rank / 2;
      auto net = net_of(1);
      DiLoCoOptions options = reference.options();
      options.group = mesh.get_group(0);
      const auto halves = [&](int step) {  // the mean over both halves is that over the whole
        return batch(replica, step).chunk(2)[static_cast<std::size_t>(rank % 2)];
      };
      const auto run = [&](auto& model) {
        DiLoCo diloco(net->parameters(), options);
        torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
        for (int step = 1; step <= reference.steps; ++step) {
          optimizer.zero_grad();
          const auto x = halves(step);
          loss_of(model.forward(x), x).backward();
          optimizer.step();
          diloco.step();
        }
      };
      at::Tensor weights;
      if (sharded) {
        FullyShardedDataParallel<nn::Sequential> model(net, {.process_group = mesh.get_group(1)});
        run(model);
        const auto full = model.summon_full_params(false);
        weights = flat(net->parameters()).clone();
      } else {
        DistributedDataParallel<nn::Sequential> model(net, {.process_group = mesh.get_group(1)});
        run(model);
        weights = flat(net->parameters());
      }
      const auto& wanted = expected[static_cast<std::size_t>(replica)];
      EXPECT_LT((weights - wanted).abs().max().item<double>(), 1e-12) << sharded;
    });
}

// spec: X2 fragments: layers dealt out by turns, each parameter once
TEST(DiLoCo, FragmentsDealOutLayers) {
  const auto net = net_of(1);
  const auto fragments = fragments_of(*net, 2);
  ASSERT_EQ(fragments.size(), 2u);
  EXPECT_EQ(fragments[0].size(), 4u);  // layers 0 and 2
  EXPECT_TRUE(fragments[1][0].is_same(net->parameters()[2]));
  EXPECT_HAS(message_of<DistError>([&] { fragments_of(*net, 4); }), "smaller count");
}

// spec: X2.refusal what cannot be, on every rank, by name
TEST(DiLoCo, RefusesWhatCannotBe) {
  on_ranks(2, [](int rank) {
    const auto says = [](const Tensors& parameters, const DiLoCoOptions& options) {
      return message_of<DistError>([&] { DiLoCo diloco(parameters, options); });
    };
    const auto one = torch::zeros({3}), wide = torch::zeros({3}, at::kDouble);
    EXPECT_HAS(says({one}, {.sync_every = 0}), "sync_every must be");
    EXPECT_HAS(says({one}, {.sync_every = 5, .delay = 5}), "less than sync_every");
    EXPECT_HAS(says({one}, {.mix = 1}), "mix must be");
    EXPECT_HAS(says({one}, {.sync_period = std::chrono::seconds(1), .delay = 1}),
               "the delay must be 0");
    EXPECT_HAS(says({one}, {.sync_period = std::chrono::seconds(1 + rank)}), "sync_period 1 s");
    EXPECT_HAS(says({}, {}), "no parameters");
    EXPECT_HAS(says({one, one}, {}), "given twice");
    EXPECT_HAS(says({torch::zeros({3}, at::kLong)}, {}), "floating-point");
    EXPECT_HAS(says({wide}, {.compression = Compression::int8}), "not of float64");
    EXPECT_HAS(says({one}, {.sync_every = 5 + rank}), "sync_every 5");
    EXPECT_HAS(says({torch::zeros({3 + rank})}, {}), "[3]");
  });
}

// spec: X2.refusal what one rank alone was given wrongly is thrown on all ranks, by name; the group
// goes on
TEST(DiLoCo, ARefusalOfOneRankIsThatOfAll) {
  on_ranks(3, [](int rank) {
    const auto says = [rank](const Tensors& wrong, const DiLoCoOptions& wrong_options) {
      const Tensors right{torch::zeros({3})};
      const std::string said = message_of<DistError>([&] {
        DiLoCo diloco(rank == 1 ? wrong : right, rank == 1 ? wrong_options : DiLoCoOptions{});
      });
      if (rank != 1) EXPECT_HAS(said, "rank 1 cannot take part");
      return said;
    };
    const auto one = torch::zeros({3});
    EXPECT_HAS(says({one}, {.sync_every = 5, .delay = 5}), "less than sync_every");
    EXPECT_HAS(says({one, one}, {}), "given twice");
    EXPECT_HAS(says({one, torch::zeros({1}, at::kLong)}, {}), "floating-point");
    EXPECT_HAS(says({one}, {.compression = static_cast<Compression>(9)}), "no such compression");
    const auto parameter = torch::full({3}, 1.0 * rank);
    DiLoCo diloco(Tensors{parameter});
    EXPECT_SAME(parameter, torch::zeros({3}));
  });
}

}  // namespace
}  // namespace muster::testing
