// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/lab.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>

#include "core/base/process/limits.h"
#include "faces/cli/bench/timing_run.h"
#include "faces/cli/parse.h"
#include "faces/cli/tree/command.h"
#include "lab/bench/other_libraries.h"
#include "lab/bench/plot.h"
#include "lab/bench/programs.h"
#include "lab/bench/simulate.h"

namespace muster::lab {
namespace {

using cli::bench::RankOptions;
using cli::bench::Row;
using cli::bench::TimingOptions;

struct LabOptions {
  TimingOptions timing;
  std::vector<std::string> others;
  std::string picture;
  bool simulate = false;
  Simulation simulation;
};

void add_simulation_options(CLI::App& app, LabOptions& options) {
  auto* simulate = app.add_flag(
      "--simulate", options.simulate,
      "predict times over links from a model, for any number of ranks; nothing is measured");
  Simulation& model = options.simulation;
  const std::string parts = "The model of --simulate";
  auto* hosts = app.add_option("--hosts", model.hosts,
                               "hosts, with equally many ranks; default: one for each rank");
  auto* per_host =
      app.add_option("--ranks-per-host", model.ranks_per_host,
                     "ranks that share a host and its network; the last host has what is left");
  for (auto* option : {hosts, per_host})
    option->check(CLI::Range(1, 10'000'000))->group(parts)->needs(simulate);
  hosts->excludes(per_host);
  app.add_flag("--play", model.play,
               "also play every message of the selected algorithm, and show that time beside the "
               "model's; for up to 4096 ranks")
      ->group(parts)
      ->needs(simulate);
  const auto figure = [&](const char* name, double& value, double unit, const char* what) {
    app.add_option_function<double>(
           name, [&value, unit](const double& given) { value = given * unit; }, what)
        ->check(cli::above_zero())
        ->group(parts)
        ->needs(simulate);
  };
  figure("--latency-us", model.machine.latency, 1e-6, "between two hosts; default 15");
  figure("--host-latency-us", model.machine.host_latency, 1e-6, "within a host; default 3");
  figure("--overhead-us", model.machine.overhead, 1e-6,
         "of every message, at each end; default 1.5");
  figure("--bandwidth-gbs", model.machine.bandwidth, 1e9,
         "of a host's network, gigabytes a second each way; default 3");
  figure("--host-bandwidth-gbs", model.machine.host_bandwidth, 1e9,
         "between two ranks of a host; default 4");
  figure("--reduction-gbs", model.machine.reduction, 1e9, "at which bytes are added up; default 8");
}

Status predict(const CLI::App& app, LabOptions options) {
  if (app.count("--ranks") == 0) options.timing.ranks = {2, 8, 64, 1024, 100'000};
  if (const int hosts = options.simulation.hosts; app.count("--ranks") == 0 && hosts > 0)
    options.timing.ranks = {hosts, 2 * hosts, 8 * hosts, 64 * hosts};
  options.simulation.ops = options.timing.ops;
  options.simulation.sizes = options.timing.sizes;
  options.simulation.ranks = options.timing.ranks;
  options.simulation.json = options.timing.json;
  return simulate(options.simulation);
}

/// With `on_mpi`, muster's calls go over backend mpi.
Status measure(LabOptions options, bool on_mpi) {
  cli::bench::Libraries libraries{options.others, plan_library, why_left_out};
  if (on_mpi) {
    options.timing.rank.transport = "mpi";
    const auto named = std::ranges::find_if(
        options.others, [](const std::string& library) { return library != "gloo"; });
    libraries.plan = [mpi = named == options.others.end() ? "" : *named](
                         const std::string& library, const RankOptions& ranks,
                         const std::string& folder) {
      return library == "muster" ? plan_muster_on_mpi(ranks, mpi, folder)
                                 : plan_library(library, ranks, folder);
    };
  }
  const auto rows = cli::bench::time_libraries(options.timing, libraries);
  if (!rows || options.picture.empty()) return rows.status();
  const FileSizeSignalBlock block;
  std::ofstream file(options.picture);
  file << plot(*rows);
  file.close();
  return file ? Status() : Status(Code::invalid_argument, "cannot write " + options.picture);
}

/// Returns only if that program cannot be run.
int become(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.data()));
  pointers.push_back(nullptr);
  ::execvp(pointers[0], pointers.data());
  return 127;
}

/// Becomes `program` beside this one, which needs torch; this one is free of it.
int become_program(const std::string& name, const std::vector<std::string>& arguments) {
  std::vector<std::string> words{cli::bench::program_beside(name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const int failed = become(words);
  std::fprintf(stderr,
               "muster-lab: %s is not there; it is built with the half of muster that needs torch "
               "(make build)\n",
               words[0].c_str());
  return failed;
}

int become_script(const std::string& file, const std::vector<std::string>& arguments) {
  const auto plan = plan_script(file, arguments);
  if (!plan) {
    std::fprintf(stderr, "muster-lab: %s\n", plan.status().message().c_str());
    return 1;
  }
  for (const auto& [name, value] : plan->environment) ::setenv(name.c_str(), value.c_str(), 1);
  return become(plan->command);
}

constexpr const char* kDescription =
    "Times muster's collectives between processes of this machine beside other libraries in the "
    "same run.\n"
    "Every rank rewrites its buffer before each call. loop: back to back, rewrite included, until "
    "the last rank is through, median of 11 loops (3, and 3 calls for p50, "
    "of a library whose one call takes five times as long as all loops were to).\n"
    "p50: one call after a barrier, from the last rank's start to the last rank's end. "
    "Microseconds.\n"
    "Libraries are compared by p50 from 64 KiB up and by loop below; a ratio below 1 is faster "
    "than the best other library.\n"
    "Instead of collectives: muster-lab mpi (backend mpi beside a plain program on the MPI that "
    "--vs names), ddp (training steps), fsdp (memory of sharded training against the plan), "
    "checkpoint (saving and loading of a sharded model), rpc (remote calls), python (calls from "
    "Python), hosts (between hosts, against what their links allow; network namespaces, as root, "
    "or a list of hosts), compressed (all_reduce with compression between such hosts), replicas "
    "(DDP and local SGD between them: loss, bytes and tokens a second), far-links (how much of a "
    "link's rate large messages reach over a long way), store, group, launch, idle, floors (what "
    "the machine itself takes); these with --help.";

int compare_libraries(bool on_mpi, const std::vector<std::string>& arguments) {
  LabOptions options;
  if (on_mpi) {
    options.others = {"openmpi"};
    options.timing.ops = {"all_reduce", "broadcast", "all_gather", "ping_pong", "barrier"};
  }
  const auto owned = cli::make_app(on_mpi ? "muster-lab mpi" : "muster-lab", kDescription);
  CLI::App& app = *owned;
  add_timing_options(app, options.timing);
  app.add_option("--vs", options.others,
                 "other libraries in the same run, in turn with muster: gloo, openmpi, mpich, impi")
      ->delimiter(',')
      ->check(CLI::IsMember(other_libraries()));
  app.add_option("--rounds", options.timing.rounds,
                 "how often everything is repeated; medians are shown. Default 3 with --vs, else 1")
      ->check(CLI::Range(1, 100));
  app.add_option("--plot", options.picture, "also draw the rows into this SVG file");
  add_simulation_options(app, options);
  if (const auto stop = cli::parse(app, arguments)) return *stop;
  if (const std::string why = cli::bench::why_not_here(options.timing);
      !options.simulate && !why.empty()) {
    std::fprintf(stderr, "muster-lab: %s; --simulate predicts larger groups\n", why.c_str());
    return cli::kUsageError;
  }
  const Status done = options.simulate ? predict(app, options) : measure(options, on_mpi);
  if (!done) std::fprintf(stderr, "muster-lab: %s\n", done.message().c_str());
  return done ? 0 : 1;
}

}  // namespace

int run_lab(const std::vector<std::string>& arguments) {
  const std::string first = arguments.empty() ? "" : arguments.front();
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1),
                                      arguments.end());
  if (first == "ddp" || first == "rpc" || first == "floors")
    return become_program("muster_bench_" + first, rest);
  if (first == "store" || first == "group" || first == "launch" || first == "idle")
    return become_program("muster_bench_services", arguments);
  const std::map<std::string, const char*> scripts{{"python", "python_calls.py"},
                                                   {"fsdp", "fsdp_steps.py"},
                                                   {"compressed", "compressed_all_reduce.py"},
                                                   {"replicas", "replica_steps.py"},
                                                   {"far-links", "far_links.py"},
                                                   {"checkpoint", "checkpoint_speed.py"}};
  if (const auto script = scripts.find(first); script != scripts.end())
    return become_script(script->second, rest);
  if (first == "hosts") {
    std::vector<std::string> words{"--worker", cli::bench::program_beside("muster_bench_worker")};
    words.insert(words.end(), rest.begin(), rest.end());
    return become_script("hosts.py", words);
  }
  return compare_libraries(first == "mpi", first == "mpi" ? rest : arguments);
}

}  // namespace muster::lab
