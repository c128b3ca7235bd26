// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "core/tunables/tuning_file.h"
#include "faces/cli/bench/algorithms.h"
#include "faces/cli/bench/timing_run.h"
#include "faces/cli/parse.h"

namespace muster::cli {
namespace {

using bench::RankOptions;
using bench::TimingOptions;

struct SelectionOptions {
  bool check = false;
  std::string tuning;
};

void add_selection_options(CLI::App& app, SelectionOptions& options) {
  const std::string group = "Which algorithm runs";
  auto* tune = app.add_option("--tune", options.tuning,
                              "measure from which size on which algorithm is faster and write it "
                              "to this file, or where groups look for it: "
                              "MUSTER_TUNING, else ~/.config/muster/tuning. Quiet machine!")
                   ->expected(0, 1)
                   ->group(group);
  app.add_flag("--check-selection", options.check,
               "measure every algorithm of muster's and fail where the selected one is slower than "
               "another by more than 10 %; takes longer where that is not clear at once")
      ->group(group)
      ->excludes(tune);
}

/// Fills options that the caller left open so that the borders between algorithms show.
bench::ComparisonOptions comparison_of(const CLI::App& app, const TimingOptions& options) {
  bench::ComparisonOptions comparison;
  comparison.ops = app.count("--op") > 0 ? options.ops : bench::known_operations();
  comparison.sizes = options.sizes;
  if (app.count("--sizes") == 0)
    comparison.sizes = {64,    1024,   4096,   8192,    16384,   32768,
                        65536, 131072, 262144, 1048576, 4194304, 16777216};
  std::ranges::sort(comparison.sizes);
  comparison.sizes.erase(std::unique(comparison.sizes.begin(), comparison.sizes.end()),
                         comparison.sizes.end());
  comparison.ranks = app.count("--ranks") > 0 ? options.ranks : std::vector<int>{2, 4};
  comparison.transports = app.count("--transport") > 0
                              ? std::vector<std::string>{options.rank.transport}
                              : std::vector<std::string>{"shm", "tcp"};
  comparison.dtype = options.dtype;
  comparison.memory = options.memories.front();
  comparison.seconds = app.count("--seconds") > 0 ? options.seconds : 0.05;
  if (options.rounds > 0) comparison.rounds = options.rounds;
  comparison.threads = options.rank.threads;
  return comparison;
}

Status measure(const CLI::App& app, const TimingOptions& options,
               const SelectionOptions& selection) {
  if (app.count("--tune") > 0) {
    const std::string path = selection.tuning.empty() ? tuning_path() : selection.tuning;
    if (path.empty())
      return Status(Code::invalid_argument,
                    "there is no place for the tuning file here; say one: --tune FILE");
    return bench::tune(comparison_of(app, options), path);
  }
  if (selection.check) return bench::check_selection(comparison_of(app, options));
  bench::Libraries libraries;
  libraries.plan = [](const std::string&, const RankOptions& ranks, const std::string& folder) {
    return Result<bench::StartPlan>(bench::plan_muster(ranks, folder));
  };
  return bench::time_libraries(options, libraries).status();
}

struct BenchOptions {
  TimingOptions timing;
  SelectionOptions selection;
};

int run_bench(const CLI::App& app, const TimingOptions& options,
              const SelectionOptions& selection) {
  std::string why = bench::why_not_here(options);
  if ((app.count("--tune") > 0 || selection.check) && options.memories.size() > 1)
    why = "--tune and --check-selection take one --memory: what is selected does not depend on it";
  if (!why.empty()) {
    std::fprintf(stderr, "muster bench: %s\n", why.c_str());
    return kUsageError;
  }
  const Status measured = measure(app, options, selection);
  if (!measured) std::fprintf(stderr, "muster bench: %s\n", measured.message().c_str());
  return measured ? 0 : 1;
}

}  // namespace

Command bench_command() {
  auto options = std::make_shared<BenchOptions>();
  auto app = make_app(
      "muster bench",
      "Times muster's collectives and messages between processes of this machine.\n"
      "Every rank rewrites its buffer before each call. loop: back to back, rewrite included, "
      "until the last rank is through, median of 11 loops.\n"
      "p50: one call after a barrier, from the last rank's start to the last rank's end. "
      "Microseconds.\n"
      "ping_pong is a message there and back. Which algorithm runs at which size: --tune, "
      "--check-selection.");
  add_timing_options(*app, options->timing);
  app->add_option("--rounds", options->timing.rounds,
                  "how often everything is repeated; medians are shown, by --tune the least. "
                  "Default 3 with --tune and --check-selection, else 1")
      ->check(CLI::Range(1, 100));
  add_selection_options(*app, options->selection);
  return make_command(app, [options, app = app.get()] {
    return run_bench(*app, options->timing, options->selection);
  });
}

}  // namespace muster::cli
