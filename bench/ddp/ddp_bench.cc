// How long a training step takes: the model alone, with DistributedDataParallel, with an all_reduce for every parameter by hand after
// backward, and with stock torch's DistributedDataParallel on Gloo, in turn. One thread a rank; every step begins after a barrier.
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
#include <optional>
#include <string>
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
  std::string json, timeline, python = "python3", worker = MUSTER_STOCK_WORKER;
};

enum class Mode { local, muster, by_hand };

/// The median step of rank 0 in milliseconds, written to `file`.
void train(int rank, Mode mode, const std::string& model_name, const Options& options, const std::string& folder) {
  at::set_num_threads(1);
  torch::manual_seed(static_cast<std::uint64_t>(rank));
  muster::init_process_group({.init_method = "file://" + folder + "/store", .world_size = options.ranks, .rank = rank});
  const auto model = bench_ddp::make_model(model_name);
  {
    std::optional<muster::DistributedDataParallel<std::shared_ptr<Model>>> shared;
    if (mode == Mode::muster) shared.emplace(model);
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    const auto inputs = model->inputs();
    const auto labels = torch::randint(10, {inputs.size(0)}, torch::kInt64);
    std::vector<double> times;
    bench_ddp::RankTimeline timeline;
    for (int step = 0; step < kWarm + options.steps; ++step) {
      muster::barrier();
      const auto start = std::chrono::steady_clock::now();
      const auto forward_from = muster::trace::wall_now_ns();
      optimizer.zero_grad();
      const auto output = shared ? shared->forward(inputs) : model->forward(inputs);
      const auto loss = torch::nn::functional::cross_entropy(output, labels);
      const auto backward_from = muster::trace::wall_now_ns();
      loss.backward();
      for (const auto& parameter : model->parameters()) {
        if (mode == Mode::by_hand) muster::all_reduce(parameter.grad(), {.op = muster::ReduceOp::AVG});
      }
      const auto optimizer_from = muster::trace::wall_now_ns();
      optimizer.step();
      timeline.phases = {{"forward", forward_from, backward_from},
                         {"backward", backward_from, optimizer_from},
                         {"optimizer", optimizer_from, muster::trace::wall_now_ns()}};
      if (step >= kWarm) times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    if (rank == 0) std::ofstream(folder + "/result") << median(times);
    if (mode == Mode::muster && !options.timeline.empty()) {
      bench_ddp::add_calls(timeline);  // of the last step
      bench_ddp::write(timeline, folder + "/timeline." + std::to_string(rank));
    }
  }
  muster::destroy_process_group();
}

double run_ours(Mode mode, const std::string& model, const Options& options) {
  const Folder folder;
  muster::spawn(train, std::tuple(mode, model, options, folder.path()), {.nprocs = options.ranks});
  double result = 0;
  std::ifstream(folder.path() + "/result") >> result;
  if (mode == Mode::muster && !options.timeline.empty()) {
    std::vector<bench_ddp::RankTimeline> ranks;
    for (int rank = 0; rank < options.ranks; ++rank) ranks.push_back(bench_ddp::read(folder.path() + "/timeline." + std::to_string(rank)));
    std::ofstream(options.timeline) << bench_ddp::draw(ranks, "a step of " + model + ", " + std::to_string(options.ranks) + " ranks");
  }
  return result;
}

double run_stock(bool local, const std::string& model, const Options& options) {
  const Folder folder;
  const std::string command = options.python + " " + options.worker + " --model " + model + " --ranks " + std::to_string(options.ranks) +
                              " --steps " + std::to_string(options.steps) + " --folder " + folder.path() + (local ? " --local" : "");
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return 0;
  double result = 0;
  if (std::fscanf(pipe, "%lf", &result) != 1) result = 0;
  ::pclose(pipe);
  return result;
}

void measure(const std::string& model, const Options& options) {
  std::map<std::string, std::vector<double>> times;
  for (int round = 0; round < options.rounds; ++round) {
    times["local"].push_back(run_ours(Mode::local, model, options));
    times["muster"].push_back(run_ours(Mode::muster, model, options));
    times["by hand"].push_back(run_ours(Mode::by_hand, model, options));
    times["stock local"].push_back(run_stock(true, model, options));
    times["stock ddp"].push_back(run_stock(false, model, options));
  }
  const auto of = [&](const char* name) { return median(times[name]); };
  const double ours = of("muster") - of("local"), stock = of("stock ddp") - of("stock local");
  std::printf("%-7s %5d %9.2f %9.2f %9.2f %12.2f %10.2f | %8.2f %8.2f", model.c_str(), options.ranks, of("local"), of("muster"),
              of("by hand"), of("stock local"), of("stock ddp"), ours, stock);
  std::printf(stock > 0 ? "   %.2f\n" : "   -\n", ours / stock);
  std::fflush(stdout);
  if (options.json.empty()) return;
  std::ofstream file(options.json, std::ios::app);
  for (const auto& [mode, values] : times) {
    file << R"({"bench":"ddp","model":")" << model << R"(","ranks":)" << options.ranks << R"(,"mode":")" << mode << R"(","step_ms":)"
         << median(values) << R"(,"least_ms":)" << *std::min_element(values.begin(), values.end()) << R"(,"rounds":)" << options.rounds
         << "}\n";
  }
}

}  // namespace

int main(int count, char** words) {
  Options options;
  if (const char* python = std::getenv("MUSTER_PYTHON"); python != nullptr && *python != '\0') options.python = python;
  CLI::App app(
      "Times training steps: the model alone, with muster's DistributedDataParallel, with one all_reduce for every parameter by hand,\n"
      "and with stock torch's on Gloo. Medians of all steps and rounds on rank 0, milliseconds; one thread a rank.",
      "muster bench ddp");
  app.add_option("--model", options.models, "mlp (784-2048-2048-10, batch 64), resnet (18 layers, 32 x 32, batch 8)")
      ->delimiter(',')
      ->check(CLI::IsMember({"mlp", "resnet"}))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "processes")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--steps", options.steps, "steps of a round that count")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--rounds", options.rounds, "how often everything is repeated, in turn")->check(CLI::Range(1, 100))->capture_default_str();
  app.add_option("--python", options.python, "a Python that has torch, for stock DDP; default MUSTER_PYTHON or python3");
  app.add_option("--timeline", options.timeline,
                 "draw the last step of the last model as an SVG: what computes, and which calls are under way");
  app.add_option("--json", options.json, "also append the rows to this file, one JSON object a line");
  CLI11_PARSE(app, count, words);
  std::printf("%-7s %5s %9s %9s %9s %12s %10s | %8s %8s   ours/stock\n", "model", "ranks", "local", "muster", "by hand", "stock local",
              "stock ddp", "overhead", "stock's");
  for (const std::string& model : options.models) measure(model, options);
  return 0;
}
