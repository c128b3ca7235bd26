// Trains a small convolutional net on handwritten digits with any number of processes, and checks its own run:
//
//   muster run --standalone --nproc-per-node 4 digits [--epochs N] [--data FOLDER]
//
// Every rank holds the whole net, works on its share of each batch, and averages its gradients with the others' through DistributedDataParallel.
#include <muster/distributed.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "dataset.h"
#include "network.h"

namespace {

constexpr std::int64_t kBatch = 64;  // of all ranks together, so that the training is the same for any number of them
constexpr double kLearningRate = 0.1;

struct Settings {
  int epochs = 12;
  std::string data = MUSTER_EXAMPLES_DATA;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw std::runtime_error(name + " needs a value");
    if (name == "--epochs")
      settings.epochs = std::stoi(argv[i + 1]);
    else if (name == "--data")
      settings.data = argv[i + 1];
    else
      throw std::runtime_error("there is no option " + name + "; the options are --epochs and --data");
  }
  return settings;
}

double mean_over_ranks(double mine) {
  auto mean = torch::tensor({mine}, torch::kFloat64);
  muster::all_reduce(mean, {.op = muster::ReduceOp::AVG});
  return mean.item<double>();
}

/// One pass over the data. Returns the mean loss of all ranks.
double train_epoch(Trainer& trainer, const Dataset& train, const muster::DistributedSampler& sampler) {
  const auto mine = sampler.indices();
  const auto share = std::max<std::int64_t>(1, kBatch / muster::get_world_size());
  double sum = 0;
  for (std::int64_t begin = 0; begin < sampler.size(); begin += share) {
    const auto end = std::min(begin + share, sampler.size());
    sum += trainer.step(train.select({mine.begin() + begin, mine.begin() + end})) * static_cast<double>(end - begin);
  }
  return mean_over_ranks(sum / static_cast<double>(sampler.size()));
}

void train(Trainer& trainer, const Split& digits, int epochs) {
  muster::DistributedSampler sampler(digits.train.size());
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    sampler.set_epoch(static_cast<std::uint64_t>(epoch));
    trainer.set_learning_rate(kLearningRate * (1 + std::cos(std::numbers::pi * epoch / epochs)) / 2);
    const auto loss = train_epoch(trainer, digits.train, sampler);
    const auto right = accuracy(trainer.network(), digits.held_out);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (muster::get_rank() != 0) continue;
    std::printf("epoch %2d/%d  loss %.4f  held-out accuracy %.2f %%  %.2f s\n", epoch + 1, epochs, loss, 100 * right, took.count());
    std::fflush(stdout);
  }
}

/// Prints the verdict on rank 0; the same on all ranks.
bool report(const char* what, const Check& check) {
  if (muster::get_rank() == 0) {
    std::printf("%s  %s: %s\n", check.holds ? "ok    " : "FAILED", what, check.figure.c_str());
    std::fflush(stdout);
  }
  return check.holds;
}

bool run(const Settings& settings) {
  const auto digits = load_digits(settings.data + "/digits.csv");
  if (muster::get_rank() == 0) {
    std::printf("%d ranks; %lld images to train on, %lld held out\n", muster::get_world_size(), static_cast<long long>(digits.train.size()),
                static_cast<long long>(digits.held_out.size()));
  }
  bool all_hold = report("20 steps match one process on the whole batch", like_one_process(digits.train, kBatch));

  torch::manual_seed(7);
  Network network;
  Trainer trainer(network, Averaging::all_ranks);
  train(trainer, digits, settings.epochs);

  all_hold &= report("all ranks hold the same weights", same_bits_everywhere(network));
  all_hold &= report("the checkpoint gives the weights back", survives_checkpoint(network));
  all_hold &= report("held-out accuracy", recognises(network, digits.held_out));
  return all_hold;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto settings = parse(argc, argv);
    at::set_num_threads(1);  // the ranks are the parallelism
    muster::init_process_group();
    if (kBatch % muster::get_world_size() != 0)
      throw std::runtime_error("the batch of " + std::to_string(kBatch) + " cannot be shared equally by " +
                               std::to_string(muster::get_world_size()) + " ranks");
    const bool all_hold = run(settings);
    muster::destroy_process_group();
    return all_hold ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
}
