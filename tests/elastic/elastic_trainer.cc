// SPDX-License-Identifier: BSD-3-Clause
// Trains a small network as a rank, and is killed on the way: for elastic_keep_test.py.
//
//   elastic_trainer STEPS [KILL...]    KILL: STEP:RANK:PHASE:MICROSECONDS:VICTIM
//
// The n-th KILL is for epoch n: in that step, that rank sends SIGKILL to the victim so many
// microseconds after the phase has begun (forward, backward, update, commit), or before the next
// one. Phase `begin` is the start of the epoch, whatever the step. The victim is the worker itself,
// all workers and spares of its node, its agent (whose end ends its workers), or the host: the
// agent and all its workers at once. Tells for each epoch what it starts from, and at the end a
// hash of all weights: in the file that ELASTIC_TRAINER_LOG names, which no death cuts short, else
// on standard output.
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

#include "muster/distributed.h"
#include "muster/elastic.h"
#include "muster/parallel.h"
#include "planned_kills.h"

namespace {

namespace nn = torch::nn;

using namespace muster::testing;

}  // namespace

int main(int count, char** words) {
  const std::int64_t steps = std::atoll(words[1]);
  const auto kills = planned(2, count, words);
  at::set_num_threads(1);
  at::manual_seed(1);
  nn::Sequential net(nn::Linear(32, 128), nn::Dropout(0.2), nn::Linear(128, 8));
  torch::optim::Adam adam(net->parameters(), 0.01);
  std::int64_t step = 0, seen = 0;
  bool repaired = false;
  muster::elastic::State state;
  state.add_module("net", *net).add_optimizer("adam", adam, *net).add_value("step", step);
  state.add_random(7);
  const auto ended = muster::elastic::run(state, [&] {
    const auto epoch = static_cast<std::size_t>(muster::elastic::epoch());
    const PlannedKill kill = epoch <= kills.size() ? kills[epoch - 1] : PlannedKill{};
    std::fprintf(told, "epoch %zu from step %lld as %d of %d%s\n", epoch,
                 static_cast<long long>(step), muster::get_rank(), muster::get_world_size(),
                 step < seen ? " LOST" : "");
    repaired = epoch > 1;
    std::optional<Phase> begins(std::in_place, "begin", kill, kill.step);
    muster::DistributedDataParallel ddp(net);
    begins.reset();
    while (step < steps) {
      at::Generator data = at::make_generator<at::CPUGeneratorImpl>(
          static_cast<std::uint64_t>(step * 1000 + muster::get_rank()));
      const at::Tensor input = at::randn({16, 32}, data);
      const at::Tensor target = at::randint(8, {16}, data, at::kLong);
      adam.zero_grad();
      at::Tensor loss;
      {
        const Phase phase("forward", kill, step);
        loss = nn::functional::cross_entropy(ddp.forward(input), target);
      }
      {
        const Phase phase("backward", kill, step);
        loss.backward();
      }
      {
        const Phase phase("update", kill, step);
        adam.step();
      }
      ++step;
      {
        const Phase phase("commit", kill, step - 1);
        state.commit();
      }
      seen = step;
      if (repaired) std::fprintf(told, "goes on at %lld\n", now_ns());
      repaired = false;
    }
  });
  std::fprintf(told, "%s at step %lld, weights %016llx\n",
               ended == muster::elastic::RunOutcome::finished ? "finished" : "preempted",
               static_cast<long long>(step), static_cast<unsigned long long>(hash_of(*net)));
  return 0;
}
