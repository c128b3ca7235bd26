// SPDX-License-Identifier: BSD-3-Clause
// A language model of letters, trained by all ranks together: DistributedDataParallel averages the
// gradients, each batch comes in pieces whose gradients add up before they travel (no_sync), and
// the optimizer's state is divided among the ranks (ZeroRedundancyOptimizer).
#include <ATen/CPUGeneratorImpl.h>
#include <muster/distributed.h>
#include <muster/parallel.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <stdexcept>
#include <string>

#include "model.h"
#include "text.h"

namespace {

constexpr std::int64_t kBatch = 16;  // windows of all ranks and pieces together
constexpr std::int64_t kPieces = 2;
constexpr double kLearningRate = 6e-3;
constexpr double kLossBound = 2.3;  // nats a letter. By the frequency of letters alone: 3.1; with
                                    // the last letter known too: 2.4

using Optimizer = muster::ZeroRedundancyOptimizer<torch::optim::AdamW>;

struct Settings {
  int steps = 220;
  std::string data = MUSTER_EXAMPLES_DATA;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw std::runtime_error(name + " needs a value");
    if (name == "--steps")
      settings.steps = std::stoi(argv[i + 1]);
    else if (name == "--data")
      settings.data = argv[i + 1];
    else
      throw std::runtime_error("unknown option " + name +
                               "; usage: text [--steps N] [--data FOLDER]");
  }
  return settings;
}

/// This rank's share of a piece of a batch. All ranks draw the same starts, so the batch is the
/// same for any number of ranks.
Windows share(const Text& text, int step, std::int64_t piece, std::int64_t pieces) {
  auto random = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
  const auto starts = torch::randint(text.train.size(0) - kContext - 1, {kBatch}, random);
  const auto each = kBatch / pieces / muster::get_world_size();
  return windows_at(
      text.train,
      starts.narrow(0, (piece * muster::get_world_size() + muster::get_rank()) * each, each),
      kContext);
}

/// Gradients of the whole batch, averaged over the ranks; they travel with the last piece. Returns
/// this rank's mean loss.
double gradients(muster::DistributedDataParallel<LanguageModel>& model, const Text& text, int step,
                 std::int64_t pieces) {
  double sum = 0;
  const auto backward = [&](std::int64_t piece) {
    const auto windows = share(text, step, piece, pieces);
    const auto loss = loss_of(model(windows.letters), windows.next) / static_cast<double>(pieces);
    loss.backward();
    sum += loss.item<double>();
  };
  for (std::int64_t piece = 0; piece + 1 < pieces; ++piece) {
    const auto quiet = model.no_sync();
    backward(piece);
  }
  backward(pieces - 1);
  return sum;
}

void set_learning_rate(Optimizer& optimizer, int step, int steps) {
  const double warm = std::min(1.0, (step + 1) / 10.0),
               decay = 0.1 + 0.45 * (1 + std::cos(std::numbers::pi * step / steps));
  for (auto& group : optimizer.param_groups()) group.options().set_lr(kLearningRate * warm * decay);
}

double mean_over_ranks(double mine) {
  auto mean = torch::tensor({mine}, torch::kFloat64);
  muster::all_reduce(mean, {.op = muster::ReduceOp::AVG});
  return mean.item<double>();
}

double held_out_loss(LanguageModel& model, const Text& text) {
  const torch::NoGradGuard no_grad;
  const auto windows = windows_at(
      text.held_out, torch::arange(0, text.held_out.size(0) - kContext - 1, kContext), kContext);
  return loss_of(model(windows.letters), windows.next).item<double>();
}

/// Continues `begin` by the model: each letter is drawn by its probability.
std::string continued(LanguageModel& model, const Text& text, const std::string& begin,
                      int letters) {
  const torch::NoGradGuard no_grad;
  auto random = at::detail::createCPUGenerator(1);
  auto numbers = text.numbers(begin);
  for (int i = 0; i < letters; ++i) {
    const auto seen = numbers.narrow(0, std::max<std::int64_t>(0, numbers.size(0) - kContext),
                                     std::min(numbers.size(0), kContext));
    const auto scores = model(seen.unsqueeze(0)).select(1, -1).squeeze(0);
    numbers = torch::cat(
        {numbers, torch::multinomial(torch::softmax(scores / 0.7, 0), 1, false, random)});
  }
  return text.spell(numbers);
}

bool report(const char* what, bool holds, const char* format, double figure) {
  if (muster::get_rank() == 0) {
    std::printf("%s  %s: ", holds ? "ok    " : "FAILED", what);
    std::printf(format, figure);
    std::printf("\n");
  }
  return holds;
}

std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.detach().clone());
  return all;
}

torch::Tensor flat(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.detach().reshape({-1}));
  return torch::cat(all);
}

/// Whether all ranks hold the same bits; the same answer on all.
bool same_everywhere(const std::vector<torch::Tensor>& tensors) {
  const auto mine = flat(tensors).view(torch::kInt32);
  auto least = mine.clone(), most = mine.clone();
  muster::all_reduce(least, {.op = muster::ReduceOp::MIN});
  muster::all_reduce(most, {.op = muster::ReduceOp::MAX});
  return torch::equal(least, most);
}

/// A batch in pieces gives the gradients of the batch at once. Returns the relative difference.
double difference_of_pieces(const Text& text) {
  const auto gradient = [&](std::int64_t pieces) {
    torch::manual_seed(3);
    LanguageModel network(static_cast<std::int64_t>(text.letters.size()));
    muster::DistributedDataParallel<LanguageModel> model(network);
    gradients(model, text, 0, pieces);
    std::vector<torch::Tensor> all;
    for (const auto& parameter : network->parameters()) all.push_back(parameter.grad());
    return flat(all);
  };
  const auto whole = gradient(1);
  return ((gradient(kPieces) - whole).norm() / whole.norm()).item<double>();
}

class Training {
 public:
  Training(const Text& text, int steps)
      : text_(text),
        steps_(steps),
        network_(static_cast<std::int64_t>(text.letters.size())),
        model_(network_),
        optimizer_(network_->parameters(),
                   torch::optim::AdamWOptions(kLearningRate).weight_decay(0.05),
                   {.parameters_as_bucket_view = true}) {}

  void run(int begin, int end, bool prints) {
    for (int step = begin; step < end; ++step) {
      set_learning_rate(optimizer_, step, steps_);
      optimizer_.zero_grad();
      const auto loss = mean_over_ranks(gradients(model_, text_, step, kPieces));
      optimizer_.step();
      if (!prints || (step + 1) % 20 != 0) continue;
      const auto unseen = held_out_loss(network_, text_);
      if (muster::get_rank() == 0)
        std::printf("step %3d/%d  loss %.3f  held out %.3f\n", step + 1, steps_, loss, unseen);
    }
  }

  /// Goes on for three steps, back to here from what a checkpoint would hold, and on again: the
  /// weights must be the same both times.
  bool resumes() {
    optimizer_.consolidate_state_dict(0);
    std::vector<std::string> state{muster::get_rank() == 0 ? optimizer_.state_dict()
                                                           : std::string()};
    muster::broadcast_object_list(state, {.src = 0});
    const auto before = copies(network_->parameters());
    run(steps_, steps_ + 3, false);
    const auto once = flat(network_->parameters());
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < before.size(); ++i) network_->parameters()[i].copy_(before[i]);
    }
    optimizer_.load_state_dict(state.front());
    run(steps_, steps_ + 3, false);
    return torch::equal(flat(network_->parameters()), once) && !torch::equal(flat(before), once);
  }

  /// How much of the parameters this rank's optimizer remembers something of.
  double share_of_state() {
    std::int64_t mine = 0;
    for (const auto& parameter : network_->parameters())
      if (optimizer_.rank_of(parameter) == muster::get_rank()) mine += parameter.numel();
    return static_cast<double>(mine) / static_cast<double>(flat(network_->parameters()).numel());
  }

  LanguageModel& network() { return network_; }

 private:
  const Text& text_;
  int steps_;
  LanguageModel network_;
  muster::DistributedDataParallel<LanguageModel> model_;
  Optimizer optimizer_;
};

bool run(const Settings& settings) {
  const auto text = load_text(settings.data + "/alice.txt");
  const auto difference = difference_of_pieces(text);
  bool all_hold = report("a batch in pieces is the batch at once", difference < 1e-4,
                         "the gradients differ by %.1e", difference);

  torch::manual_seed(7);
  Training training(text, settings.steps);
  training.run(0, settings.steps, true);
  const auto loss = held_out_loss(training.network(), text);
  if (muster::get_rank() == 0)
    std::printf("\n%s\n\n", continued(training.network(), text, "Alice ", 160).c_str());

  all_hold &= report("held-out loss", loss < kLossBound, "%.3f nats a letter", loss);
  auto largest = torch::tensor({training.share_of_state()}, torch::kFloat64);
  muster::all_reduce(largest, {.op = muster::ReduceOp::MAX});
  const auto ranks = muster::get_world_size();
  all_hold &= report("the optimizer's state is divided", largest.item<double>() < 1.3 / ranks,
                     "a rank holds at most %.0f %%", 100 * largest.item<double>());
  const bool same = same_everywhere(training.network()->parameters());
  all_hold &= report("all ranks hold the same weights", same, "%.0f of them",
                     static_cast<double>(flat(training.network()->parameters()).numel()));
  const bool resumed = training.resumes();
  return report("training goes on from a checkpoint as if it had not stopped", resumed,
                "%.0f steps", 3.0) &&
         all_hold;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto settings = parse(argc, argv);
    at::set_num_threads(1);  // the ranks are the parallelism
    muster::init_process_group();
    if (kBatch / kPieces % muster::get_world_size() != 0)
      throw std::runtime_error("pieces of " + std::to_string(kBatch / kPieces) +
                               " windows cannot be shared equally by " +
                               std::to_string(muster::get_world_size()) + " ranks");
    const bool all_hold = run(settings);
    muster::destroy_process_group();
    return all_hold ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "text: %s\n", error.what());
    return 1;
  }
}
