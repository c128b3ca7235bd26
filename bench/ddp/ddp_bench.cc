// SPDX-License-Identifier: BSD-3-Clause
// How long a training step takes: the model alone, with DistributedDataParallel, with an all_reduce
// for every parameter by hand after backward, step by step in turn; and with stock torch's
// DistributedDataParallel on Gloo beside the model alone, likewise (with --stock on muster too, and
// in a group of each rank alone). One thread a rank; every step begins after a barrier, with the
// last rank's start, and ends when all ranks are done, of the model alone as well: that a rank
// computes longer than another is no cost of communication. Overheads are medians over turns of the
// difference to the local step of the same turn. Rank 0's own times are told too: they hold its
// waiting for the other ranks' computing.
//
//   muster_bench_ddp [--model mlp,resnet] [--ranks N] [--steps N] [--rounds N] [--timeline FILE]
//       [--json FILE]

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../stock.h"
#include "core/base/process/temporary_folder.h"
#include "core/trace/reader.h"
#include "faces/cli/bench/measurement.h"
#include "faces/cli/parse.h"
#include "models.h"
#include "muster/distributed.h"
#include "muster/parallel.h"
#include "timeline.h"

namespace {

using bench_ddp::Model;
using muster::TemporaryFolder;
using muster::cli::bench::median;
constexpr int kWarm = 5;
// Stock torch's DistributedDataParallel in a group of each rank alone: what is left is its own
// copying into buckets and back.
constexpr const char* kSendsNothing = "stock, nothing sent";

struct Options {
  std::vector<std::string> models{"mlp", "resnet"};
  int ranks = 2, steps = 20, rounds = 3;
  bool stock = false;
  std::string json, timeline, package;
};

/// How gradients are averaged: not at all, by DistributedDataParallel, by an all_reduce for every
/// parameter after backward.
enum Mode { kLocal, kMuster, kByHand, kModes };

/// On the clock that all processes of a host share, as Python's time.perf_counter is.
struct Span {
  double start = 0, end = 0;  // milliseconds
};
double milliseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration<double, std::milli>(time.time_since_epoch()).count();
}

/// One model with its optimizer, trained in one way.
class Trainer {
 public:
  Trainer(Mode mode, const std::string& model_name)
      : mode_(mode),
        model_(bench_ddp::make_model(model_name)),
        optimizer_(model_->parameters(), 0.01) {
    if (mode == kMuster) shared_.emplace(model_);
    inputs_ = model_->inputs();
    labels_ = torch::randint(10, {inputs_.size(0)}, torch::kInt64);
  }

  /// When a step began and ended that all ranks begin together.
  Span step() {
    muster::barrier();
    const auto start = std::chrono::steady_clock::now();
    const auto forward_from = muster::trace::wall_now_ns();
    optimizer_.zero_grad();
    const auto output = shared_ ? shared_->forward(inputs_) : model_->forward(inputs_);
    const auto loss = torch::nn::functional::cross_entropy(output, labels_);
    const auto backward_from = muster::trace::wall_now_ns();
    loss.backward();
    if (mode_ == kByHand)
      for (const auto& parameter : model_->parameters())
        muster::all_reduce(parameter.grad(), {.op = muster::ReduceOp::AVG});
    const auto optimizer_from = muster::trace::wall_now_ns();
    optimizer_.step();
    timeline.phases = {{"forward", forward_from, backward_from},
                       {"backward", backward_from, optimizer_from},
                       {"optimizer", optimizer_from, muster::trace::wall_now_ns()}};
    return {milliseconds(start), milliseconds(std::chrono::steady_clock::now())};
  }

  bench_ddp::RankTimeline timeline;  ///< of the last step

 private:
  Mode mode_;
  std::shared_ptr<Model> model_;
  std::optional<muster::DistributedDataParallel<std::shared_ptr<Model>>> shared_;
  torch::optim::SGD optimizer_;
  at::Tensor inputs_, labels_;
};

/// Steps of all modes in turn, so that what the machine does meanwhile meets all alike. Each rank's
/// times are written to `folder`, a line a turn.
void train(int rank, const std::string& model_name, const Options& options,
           const std::string& folder) {
  at::set_num_threads(1);
  torch::manual_seed(static_cast<std::uint64_t>(rank));
  muster::init_process_group(
      {.init_method = "file://" + folder + "/store", .world_size = options.ranks, .rank = rank});
  {
    std::vector<std::unique_ptr<Trainer>> trainers;
    for (int mode = 0; mode < kModes; ++mode)
      trainers.push_back(std::make_unique<Trainer>(static_cast<Mode>(mode), model_name));
    std::ofstream result(folder + "/result." + std::to_string(rank));
    result.precision(15);
    for (int turn = 0; turn < kWarm + options.steps; ++turn) {
      Span times[kModes] = {};
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
      if (turn < kWarm) continue;
      for (const Mode mode : {kLocal, kMuster, kByHand})
        result << times[mode].start << ' ' << times[mode].end << '\n';
    }
  }
  muster::destroy_process_group();
}

/// Milliseconds of one mode's steps.
struct Steps {
  std::vector<double> all;    ///< from the last rank's start to the last rank's end
  std::vector<double> rank0;  ///< rank 0's own
};
using Columns = std::map<std::string, Steps>;

/// Appends the times that the ranks have written into `folder`: starts and ends in turn, one of
/// each for every name.
void append(Columns& columns, const std::string& folder, int ranks,
            const std::vector<std::string>& names) {
  std::vector<std::vector<Span>> times(static_cast<std::size_t>(ranks));
  std::size_t count = SIZE_MAX;
  for (int rank = 0; rank < ranks; ++rank) {
    auto& own = times[static_cast<std::size_t>(rank)];
    std::ifstream file(folder + "/result." + std::to_string(rank));
    for (Span span; file >> span.start >> span.end;) own.push_back(span);
    count = std::min(count, own.size());
  }
  for (std::size_t i = 0; i < count; ++i) {
    Span last;
    for (const auto& own : times)
      last = {std::max(last.start, own[i].start), std::max(last.end, own[i].end)};
    Steps& steps = columns[names[i % names.size()]];
    steps.all.push_back(last.end - last.start);
    steps.rank0.push_back(times[0][i].end - times[0][i].start);
  }
}

void run_ours(const std::string& model, const Options& options, Columns& columns) {
  const TemporaryFolder folder("muster-bench-");
  muster::spawn(train, std::tuple(model, options, folder.path()), {.nprocs = options.ranks});
  append(columns, folder.path(), options.ranks, {"local", "muster", "by hand"});
  if (options.timeline.empty()) return;
  std::vector<bench_ddp::RankTimeline> ranks;
  for (int rank = 0; rank < options.ranks; ++rank)
    ranks.push_back(bench_ddp::read(folder.path() + "/timeline." + std::to_string(rank)));
  std::ofstream(options.timeline) << bench_ddp::draw(
      ranks, "a step of " + model + ", " + std::to_string(options.ranks) + " ranks");
}

void run_stock(muster_bench::Stock& stock, const std::string& model, const Options& options,
               Columns& columns) {
  const TemporaryFolder folder("muster-bench-");
  std::vector<std::string> arguments{"--model",  model,
                                     "--ranks",  std::to_string(options.ranks),
                                     "--steps",  std::to_string(options.steps),
                                     "--folder", folder.path()};
  std::vector<std::pair<std::string, std::string>> variables;
  if (options.stock) {
    arguments.emplace_back("--muster");
    variables = muster::lab::variables_to_import_muster(options.package);
  }
  stock.run(arguments, variables);
  std::vector<std::string> names{"stock local", "stock ddp"};
  if (options.stock) names.insert(names.end(), {"stock on muster", kSendsNothing});
  append(columns, folder.path(), options.ranks, names);
}

/// The medians of what steps of a mode took longer than the local one of the same turn, in
/// milliseconds; without modes that were not measured.
std::map<std::string, double> overheads(Columns& times, std::vector<double> Steps::*clock) {
  std::map<std::string, double> medians;
  for (const char* mode : {"muster", "by hand", "stock ddp", "stock on muster", kSendsNothing}) {
    const bool ours = std::string(mode) == "muster" || std::string(mode) == "by hand";
    const std::vector<double>&longer = times[mode].*clock,
          &shorter = times[ours ? "local" : "stock local"].*clock;
    std::vector<double> more;
    for (std::size_t i = 0; i < std::min(longer.size(), shorter.size()); ++i)
      more.push_back(longer[i] - shorter[i]);
    if (!more.empty()) medians[mode] = median(more);
  }
  return medians;
}

void print(const std::string& clock, const std::map<std::string, double>& more) {
  std::printf("  %-28s", clock.c_str());
  for (const char* mode : {"muster", "by hand", "stock ddp"})
    more.contains(mode) ? std::printf(" %9.2f", more.at(mode)) : std::printf(" %9s", "-");
  const double reference = more.contains("stock ddp") ? more.at("stock ddp") : 0;
  std::printf(reference > 0 ? "   %.2f" : "   -", more.at("muster") / reference);
  if (reference > 0 && more.contains("stock on muster") && more.contains(kSendsNothing)) {
    const double ours = more.at("stock on muster"), copies = more.at(kSendsNothing);
    std::printf("   | stock's with backend \"muster\" %.2f: %.2f", ours, ours / reference);
    if (copies < reference)
      std::printf("; where nothing is sent %.2f, so communication %.2f of %.2f: %.2f", copies,
                  ours - copies, reference - copies, (ours - copies) / (reference - copies));
  }
  std::printf("\n");
}

/// False if a contestant has no figures.
bool measure(muster_bench::Stock& stock, const std::string& model, const Options& options) {
  Columns times;
  for (int round = 0; round < options.rounds; ++round) {
    run_ours(model, options, times);
    run_stock(stock, model, options, times);
  }
  std::printf("%s, %d ranks, %zu turns; steps until all ranks are done:", model.c_str(),
              options.ranks, times["local"].all.size());
  for (const auto& [mode, steps] : times)
    if (!steps.all.empty()) std::printf("  %s %.2f", mode.c_str(), median(steps.all));
  std::printf("\n  %-28s %9s %9s %9s   muster/stock\n", "longer than local", "muster", "by hand",
              "stock");
  const auto all = overheads(times, &Steps::all), rank0 = overheads(times, &Steps::rank0);
  print("until all ranks are done", all);
  print("on rank 0 alone", rank0);
  std::fflush(stdout);
  const bool whole = !times["local"].all.empty() && !times["stock local"].all.empty();
  if (options.json.empty()) return whole;
  std::ofstream file(options.json, std::ios::app);
  for (const auto& [mode, steps] : times) {
    if (steps.all.empty()) continue;
    const auto more = [&mode = mode](const auto& by_mode) {
      return by_mode.contains(mode) ? by_mode.at(mode) : 0.0;
    };
    file << R"({"bench":"ddp","model":")" << model << R"(","ranks":)" << options.ranks
         << R"(,"mode":")" << mode << R"(","step_ms":)" << median(steps.all) << R"(,"overhead_ms":)"
         << more(all) << R"(,"rank0_step_ms":)" << median(steps.rank0) << R"(,"rank0_overhead_ms":)"
         << more(rank0) << R"(,"steps":)" << steps.all.size() << "}\n";
  }
  return whole;
}

}  // namespace

int main(int count, char** words) {
  Options options;
  muster_bench::Stock stock("stock_ddp_worker.py");
  CLI::App app(
      "Times training steps: the model alone, with muster's DistributedDataParallel, with one "
      "all_reduce for every parameter by hand,\n"
      "and with stock torch's on Gloo. Milliseconds, one thread a rank. Modes take their steps in "
      "turn; an overhead is the median of what\n"
      "a step takes longer than the local one of the same turn, until all ranks are done (else a "
      "rank's waiting for another's computing\n"
      "would count as communication), and on rank 0 alone.",
      "muster-lab ddp");
  app.add_option("--model", options.models,
                 "mlp (784-2048-2048-10, batch 64), resnet (18 layers, 32 x 32, batch 8)")
      ->delimiter(',')
      ->check(CLI::IsMember({"mlp", "resnet"}))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "processes")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "steps of a round that count")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "how often all processes are started anew")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  stock.add_option(app);
  app.add_flag("--stock", options.stock,
               "also stock torch's DistributedDataParallel on the backend \"muster\", and where "
               "nothing is sent: what its own copying takes");
  app.add_option("--package", options.package,
                 "the folder that holds the Python package `muster`, for --stock; default: the "
                 "build folder's, or where it is installed");
  app.add_option("--timeline", options.timeline,
                 "draw the last step of the last model as an SVG: what computes, and which calls "
                 "are under way");
  app.add_option("--json", options.json,
                 "also append the rows to this file, one JSON object a line");
  if (const auto stop = muster::cli::parse(app, {words + 1, words + count})) return *stop;
  bool whole = true;
  for (const std::string& model : options.models) whole = measure(stock, model, options) && whole;
  return whole ? 0 : 1;
}
