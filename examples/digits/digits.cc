// SPDX-License-Identifier: BSD-3-Clause
// Trains a small convolutional net on handwritten digits with any number of processes, and checks
// its own run:
//
//   muster run --standalone --nproc-per-node 4 digits [--epochs N] [--data FOLDER] [--join yes]
//
// Every rank holds the whole net, works on its share of each batch, and averages its gradients with
// the others' through DistributedDataParallel.
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

constexpr std::int64_t kBatch =
    64;  // of all ranks together, so that the training is the same for any number of them
constexpr double kLearningRate = 0.1;

struct Settings {
  int epochs = 12;
  std::string data = MUSTER_EXAMPLES_DATA;
  bool join = false;  // the ranks have shares of different sizes
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
    else if (name == "--join")
      settings.join = std::string(argv[i + 1]) == "yes";
    else
      throw std::runtime_error("there is no option " + name +
                               "; the options are --epochs, --data and --join");
  }
  return settings;
}

using Indices = std::vector<std::int64_t>;

/// Equal shares of the epoch's order, some images twice where it cannot be divided.
Indices equal_share(std::int64_t images, std::uint64_t epoch) {
  muster::DistributedSampler sampler(images);
  sampler.set_epoch(epoch);
  return sampler.indices();
}

/// Rank r's r + 1 parts of 1 + 2 + ... + n: every image once, and no two ranks with as many.
Indices uneven_share(std::int64_t images, std::uint64_t epoch) {
  muster::DistributedSampler everything(images, {.num_replicas = 1, .rank = 0});
  everything.set_epoch(epoch);
  const auto order = everything.indices();
  const std::int64_t rank = muster::get_rank(), ranks = muster::get_world_size();
  const auto start_of = [&](std::int64_t r) {
    return order.begin() + images * r * (r + 1) / (ranks * (ranks + 1));
  };
  return {start_of(rank), start_of(rank + 1)};
}

/// Trains on this rank's share. Returns the sum of its images' losses.
double train_on(Trainer& trainer, const Dataset& train, const Indices& mine) {
  const auto step = std::max<std::int64_t>(1, kBatch / muster::get_world_size());
  const auto images = static_cast<std::int64_t>(mine.size());
  double sum = 0;
  for (std::int64_t begin = 0; begin < images; begin += step) {
    const auto end = std::min(begin + step, images);
    sum += trainer.step(train.select({mine.begin() + begin, mine.begin() + end})) *
           static_cast<double>(end - begin);
  }
  return sum;
}

/// One pass over the data. Returns the mean loss of all ranks' images.
double train_epoch(Trainer& trainer, const Dataset& train, std::uint64_t epoch, bool join) {
  const auto mine = join ? uneven_share(train.size(), epoch) : equal_share(train.size(), epoch);
  double sum = 0;
  if (join) {
    auto together =
        trainer
            .join();  // a rank that has no images left gives the others zeros, until all are done
    together.run([&] { sum = train_on(trainer, train, mine); });
  } else {
    sum = train_on(trainer, train, mine);
  }
  auto totals = torch::tensor({sum, static_cast<double>(mine.size())}, torch::kFloat64);
  muster::all_reduce(totals);
  return (totals[0] / totals[1]).item<double>();
}

void train(Trainer& trainer, const Split& digits, const Settings& settings) {
  const int epochs = settings.epochs;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    trainer.set_learning_rate(kLearningRate * (1 + std::cos(std::numbers::pi * epoch / epochs)) /
                              2);
    const auto loss =
        train_epoch(trainer, digits.train, static_cast<std::uint64_t>(epoch), settings.join);
    const auto right = accuracy(trainer.network(), digits.held_out);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (muster::get_rank() != 0) continue;
    std::printf("epoch %2d/%d  loss %.4f  held-out accuracy %.2f %%  %.2f s\n", epoch + 1, epochs,
                loss, 100 * right, took.count());
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
    std::printf("%d ranks; %lld images to train on, %lld held out\n", muster::get_world_size(),
                static_cast<long long>(digits.train.size()),
                static_cast<long long>(digits.held_out.size()));
  }
  bool all_hold = report("20 steps match one process on the whole batch",
                         like_one_process(digits.train, kBatch));

  torch::manual_seed(7);
  Network network;
  Trainer trainer(network, Averaging::all_ranks);
  train(trainer, digits, settings);

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
      throw std::runtime_error("the batch of " + std::to_string(kBatch) +
                               " cannot be shared equally by " +
                               std::to_string(muster::get_world_size()) + " ranks");
    const bool all_hold = run(settings);
    muster::destroy_process_group();
    return all_hold ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
}
