// How long a training step takes: the model alone, with DistributedDataParallel, with an all_reduce for every parameter by hand after
// backward, step by step in turn; and with stock torch's DistributedDataParallel on Gloo beside the model alone, likewise. One thread a
// rank; every step begins after a barrier. Overheads are medians over turns of the difference to the local step of the same turn.
//
//   muster_bench_ddp [--model mlp,resnet] [--ranks N] [--steps N] [--rounds N] [--timeline FILE] [--json FILE]

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "models.h"
#include "muster/cli/bench/cell.h"
#include "muster/cli/bench/folder.h"
#include "muster/distributed.h"
#include "muster/parallel.h"
#include "muster/trace/reader.h"
#include "timeline.h"

namespace {

using bench_ddp::Model;
using muster::cli::bench::Folder;
using muster::cli::bench::median;
constexpr int kWarm = 5;

struct Options {
  std::vector<std::string> models{"mlp", "resnet"};
  int ranks = 2, steps = 20, rounds = 3;
  bool stock = false;
  std::string json, timeline, python = "python3", worker = MUSTER_STOCK_WORKER, package = MUSTER_PYTHON_PACKAGE;
};

/// How gradients are averaged: not at all, by DistributedDataParallel, by an all_reduce for every parameter after backward.
enum Mode { kLocal, kMuster, kByHand, kModes };

/// One model with its optimizer, trained in one way.
class Trainer {
 public:
  Trainer(Mode mode, const std::string& model_name)
      : mode_(mode), model_(bench_ddp::make_model(model_name)), optimizer_(model_->parameters(), 0.01) {
    if (mode == kMuster) shared_.emplace(model_);
    inputs_ = model_->inputs();
    labels_ = torch::randint(10, {inputs_.size(0)}, torch::kInt64);
  }

  /// Milliseconds of a step that all ranks begin together.
  double step() {
    muster::barrier();
    const auto start = std::chrono::steady_clock::now();
    const auto forward_from = muster::trace::wall_now_ns();
    optimizer_.zero_grad();
    const auto output = shared_ ? shared_->forward(inputs_) : model_->forward(inputs_);
    const auto loss = torch::nn::functional::cross_entropy(output, labels_);
    const auto backward_from = muster::trace::wall_now_ns();
    loss.backward();
    if (mode_ == kByHand)
      for (const auto& parameter : model_->parameters()) muster::all_reduce(parameter.grad(), {.op = muster::ReduceOp::AVG});
    const auto optimizer_from = muster::trace::wall_now_ns();
    optimizer_.step();
    timeline.phases = {{"forward", forward_from, backward_from},
                       {"backward", backward_from, optimizer_from},
                       {"optimizer", optimizer_from, muster::trace::wall_now_ns()}};
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }

  bench_ddp::RankTimeline timeline;  ///< of the last step

 private:
  Mode mode_;
  std::shared_ptr<Model> model_;
  std::optional<muster::DistributedDataParallel<std::shared_ptr<Model>>> shared_;
  torch::optim::SGD optimizer_;
  at::Tensor inputs_, labels_;
};

/// Steps of all modes in turn, so that what the machine does meanwhile meets all alike. Rank 0's times are written to `folder`, a line a
/// turn.
void train(int rank, const std::string& model_name, const Options& options, const std::string& folder) {
  at::set_num_threads(1);
  torch::manual_seed(static_cast<std::uint64_t>(rank));
  muster::init_process_group({.init_method = "file://" + folder + "/store", .world_size = options.ranks, .rank = rank});
  {
    std::vector<std::unique_ptr<Trainer>> trainers;
    for (int mode = 0; mode < kModes; ++mode) trainers.push_back(std::make_unique<Trainer>(static_cast<Mode>(mode), model_name));
    std::ofstream result;
    if (rank == 0) result.open(folder + "/result");
    for (int turn = 0; turn < kWarm + options.steps; ++turn) {
      double times[kModes] = {};
      for (int i = 0; i < kModes; ++i) {
        const int mode = (turn + i) % kModes;  // each comes after each other alike
        times[mode] = trainers[static_cast<std::size_t>(mode)]->step();
        // Else the record keeps other calls' too.
        if (mode == kMuster && turn == kWarm + options.steps - 1 && !options.timeline.empty()) {
          auto& timeline = trainers[kMuster]->timeline;
          bench_ddp::add_calls(timeline);
          bench_ddp::write(timeline, folder + "/timeline." + std::to_string(rank));
        }
      }
      if (turn >= kWarm && rank == 0) result << times[kLocal] << ' ' << times[kMuster] << ' ' << times[kByHand] << '\n';
    }
  }
  muster::destroy_process_group();
}

using Columns = std::map<std::string, std::vector<double>>;

/// Numbers in turn, one for every name.
void append(Columns& columns, std::istream& numbers, const std::vector<std::string>& names) {
  double number = 0;
  for (std::size_t i = 0; numbers >> number; ++i) columns[names[i % names.size()]].push_back(number);
}

void run_ours(const std::string& model, const Options& options, Columns& columns) {
  const Folder folder;
  muster::spawn(train, std::tuple(model, options, folder.path()), {.nprocs = options.ranks});
  std::ifstream result(folder.path() + "/result");
  append(columns, result, {"local", "muster", "by hand"});
  if (options.timeline.empty()) return;
  std::vector<bench_ddp::RankTimeline> ranks;
  for (int rank = 0; rank < options.ranks; ++rank) ranks.push_back(bench_ddp::read(folder.path() + "/timeline." + std::to_string(rank)));
  std::ofstream(options.timeline) << bench_ddp::draw(ranks, "a step of " + model + ", " + std::to_string(options.ranks) + " ranks");
}

void run_stock(const std::string& model, const Options& options, Columns& columns) {
  const Folder folder;
  const std::string command = options.python + " " + options.worker + " --model " + model + " --ranks " + std::to_string(options.ranks) +
                              " --steps " + std::to_string(options.steps) + " --folder " + folder.path() +
                              (options.stock ? " --muster " + options.package : "");
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return;
  std::string text;
  char piece[4096];
  while (const std::size_t got = std::fread(piece, 1, sizeof piece, pipe)) text.append(piece, got);
  ::pclose(pipe);
  std::istringstream numbers(text);
  std::vector<std::string> names{"stock local", "stock ddp"};
  if (options.stock) names.push_back("stock on muster");
  append(columns, numbers, names);
}

/// The median of what a step took longer than the other one of its turn.
double median_more(const std::vector<double>& longer, const std::vector<double>& shorter) {
  std::vector<double> more;
  for (std::size_t i = 0; i < std::min(longer.size(), shorter.size()); ++i) more.push_back(longer[i] - shorter[i]);
  return more.empty() ? 0 : median(more);
}

void measure(const std::string& model, const Options& options) {
  Columns times;
  for (int round = 0; round < options.rounds; ++round) {
    run_ours(model, options, times);
    run_stock(model, options, times);
  }
  const auto of = [&](const char* name) { return times[name].empty() ? 0 : median(times[name]); };
  const double ours = median_more(times["muster"], times["local"]), by_hand = median_more(times["by hand"], times["local"]),
               stock = median_more(times["stock ddp"], times["stock local"]);
  std::printf("%-7s %5d %9.2f %9.2f %9.2f %12.2f %10.2f | %8.2f %8.2f %8.2f", model.c_str(), options.ranks, of("local"), of("muster"),
              of("by hand"), of("stock local"), of("stock ddp"), ours, by_hand, stock);
  std::printf(stock > 0 ? "   %.2f\n" : "   -\n", ours / stock);
  const double on_muster = median_more(times["stock on muster"], times["stock local"]);
  if (options.stock)
    std::printf("        stock's own with backend \"muster\": step %.2f, overhead %.2f: %.2f of that with gloo\n", of("stock on muster"),
                on_muster, stock > 0 ? on_muster / stock : 0);
  std::fflush(stdout);
  if (options.json.empty()) return;
  const std::map<std::string, double> overheads{
      {"muster", ours}, {"by hand", by_hand}, {"stock ddp", stock}, {"stock on muster", on_muster}};
  std::ofstream file(options.json, std::ios::app);
  for (const auto& [mode, values] : times) {
    file << R"({"bench":"ddp","model":")" << model << R"(","ranks":)" << options.ranks << R"(,"mode":")" << mode << R"(","step_ms":)"
         << of(mode.c_str()) << R"(,"overhead_ms":)" << (overheads.count(mode) != 0 ? overheads.at(mode) : 0) << R"(,"steps":)"
         << values.size() << "}\n";
  }
}

}  // namespace

int main(int count, char** words) {
  Options options;
  if (const char* python = std::getenv("MUSTER_PYTHON"); python != nullptr && *python != '\0') options.python = python;
  CLI::App app(
      "Times training steps: the model alone, with muster's DistributedDataParallel, with one all_reduce for every parameter by hand,\n"
      "and with stock torch's on Gloo. Milliseconds on rank 0, one thread a rank. Modes take their steps in turn; an overhead is the "
      "median\n"
      "of what a step takes longer than the local one of the same turn.",
      "muster bench ddp");
  app.add_option("--model", options.models, "mlp (784-2048-2048-10, batch 64), resnet (18 layers, 32 x 32, batch 8)")
      ->delimiter(',')
      ->check(CLI::IsMember({"mlp", "resnet"}))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "processes")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--steps", options.steps, "steps of a round that count")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--rounds", options.rounds, "how often all processes are started anew")->check(CLI::Range(1, 100))->capture_default_str();
  app.add_option("--python", options.python, "a Python that has torch, for stock DDP; default MUSTER_PYTHON or python3");
  app.add_flag("--stock", options.stock, "also stock torch's DistributedDataParallel on the backend \"muster\"");
  app.add_option("--package", options.package, "the folder that holds the Python package `muster`, for --stock");
  app.add_option("--timeline", options.timeline,
                 "draw the last step of the last model as an SVG: what computes, and which calls are under way");
  app.add_option("--json", options.json, "also append the rows to this file, one JSON object a line");
  CLI11_PARSE(app, count, words);
  std::printf("%-7s %5s %9s %9s %9s %12s %10s | %8s %8s %8s   ours/stock\n", "model", "ranks", "local", "muster", "by hand", "stock local",
              "stock ddp", "overhead", "by hand", "stock's");
  for (const std::string& model : options.models) measure(model, options);
  return 0;
}
