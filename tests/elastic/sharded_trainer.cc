// SPDX-License-Identifier: BSD-3-Clause
// As elastic_trainer.cc, with parts that no other rank has: for elastic_shards_test.py.
//
//   sharded_trainer fsdp|zero STEPS [KILL...]
//
// fsdp: the network is sharded, so its optimizer is. zero: the network is whole and its optimizer
// divided. Phase `begin` lasts until the shards are restored. A KILL `unrestored` trains without
// restore(), `unbound` binds nothing from the second epoch on.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "muster/distributed.h"
#include "muster/elastic.h"
#include "muster/parallel.h"
#include "planned_kills.h"

namespace {

namespace nn = torch::nn;
using namespace muster::testing;

nn::Sequential new_net() {
  at::manual_seed(1);
  return nn::Sequential(nn::Linear(32, 127), nn::Dropout(0.2), nn::Linear(127, 9));
}

/// Steps are the same whatever the network is wrapped in.
struct Trainer {
  std::int64_t steps = 0, step = 0, seen = 0;
  std::uint64_t hash = 0;
  std::vector<PlannedKill> kills;
  muster::elastic::State state{};

  PlannedKill kill_now() const {
    const auto epoch = static_cast<std::size_t>(muster::elastic::epoch());
    return epoch <= kills.size() ? kills[epoch - 1] : PlannedKill{};
  }
  void tell_begin() const {
    std::fprintf(told, "epoch %lld from step %lld as %d of %d%s\n",
                 static_cast<long long>(muster::elastic::epoch()), static_cast<long long>(step),
                 muster::get_rank(), muster::get_world_size(), step < seen ? " LOST" : "");
  }
  template <class Forward>
  void train(const Forward& forward, torch::optim::Optimizer& optimizer) {
    const PlannedKill kill = kill_now();
    int made = 0;  // in this epoch
    while (step < steps) {
      at::Generator data = at::make_generator<at::CPUGeneratorImpl>(
          static_cast<std::uint64_t>(step * 1000 + muster::get_rank()));
      const at::Tensor input = at::randn({16, 32}, data);
      const at::Tensor target = at::randint(8, {16}, data, at::kLong);
      optimizer.zero_grad();
      at::Tensor loss;
      {
        const Phase phase("forward", kill, step);
        loss = nn::functional::cross_entropy(forward(input), target);
      }
      {
        const Phase phase("backward", kill, step);
        loss.backward();
      }
      {
        const Phase phase("update", kill, step);
        optimizer.step();
      }
      ++step;
      {
        const Phase phase("commit", kill, step - 1);
        state.commit();
      }
      seen = step;
      if (++made == 50) std::fprintf(told, "commits 50\n");
    }
  }
};

}  // namespace

int main(int count, char** words) {
  const std::string mode = words[1];
  Trainer trainer{.steps = std::atoll(words[2]), .kills = {}};
  const std::string special = count > 3 ? words[3] : "";
  if (special.find(':') != std::string::npos) trainer.kills = planned(3, count, words);
  if (special == "unbound") trainer.kills = {{3, 1, "forward", 0, "worker"}};
  at::set_num_threads(1);
  nn::Sequential whole = new_net();
  muster::elastic::State& state = trainer.state;
  state.add_value("step", trainer.step).add_random(7);
  if (mode == "zero") state.add_module("net", *whole);

  const auto sharded = [&] {
    trainer.tell_begin();
    const PlannedKill kill = trainer.kill_now();
    std::optional<Phase> begins(std::in_place, "begin", kill, kill.step);
    nn::Sequential net = new_net();
    muster::FullyShardedDataParallel<nn::Sequential> model(net);
    torch::optim::Adam adam(net->parameters(), 0.01);
    std::optional<muster::elastic::ShardedState> shards;
    if (special != "unbound" || muster::elastic::epoch() == 1) {
      shards.emplace(state);
      shards->add_module("net", *net).add_optimizer("adam", adam, *net);
      if (special != "unrestored") shards->restore();
    }
    begins.reset();
    trainer.train([&](const at::Tensor& input) { return model.forward(input); }, adam);
    const auto gathered = model.summon_full_params(false);
    trainer.hash = hash_of(*net);
  };
  const auto divided = [&] {
    trainer.tell_begin();
    const PlannedKill kill = trainer.kill_now();
    std::optional<Phase> begins(std::in_place, "begin", kill, kill.step);
    muster::DistributedDataParallel model(whole);
    muster::ZeroRedundancyOptimizer<torch::optim::Adam> adam(whole->parameters(),
                                                             torch::optim::AdamOptions(0.01));
    muster::elastic::ShardedState shards(state);
    shards.add_optimizer("adam", adam, *whole).restore();
    begins.reset();
    trainer.train([&](const at::Tensor& input) { return model.forward(input); }, adam);
    trainer.hash = hash_of(*whole);
  };
  try {
    const auto ended = mode == "zero" ? muster::elastic::run(state, divided)
                                      : muster::elastic::run(state, sharded);
    std::fprintf(told, "%s at step %lld, weights %016llx\n",
                 ended == muster::elastic::RunOutcome::finished ? "finished" : "preempted",
                 static_cast<long long>(trainer.step),
                 static_cast<unsigned long long>(trainer.hash));
  } catch (const std::exception& error) {
    std::fprintf(told, "failed: %s\n", error.what());
    return 1;
  }
  return 0;
}
