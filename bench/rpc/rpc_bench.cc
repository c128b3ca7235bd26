// SPDX-License-Identifier: BSD-3-Clause
// How long calls to another process take: an empty one, echoes of tensors, and how many a second
// with several in flight; muster's, over shared memory and over sockets, and stock torch's, in
// turn.
//
//   muster_bench_rpc [--vs torch] [--rounds N] [--quick] [--json FILE]

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "../stock.h"
#include "core/base/process/temporary_folder.h"
#include "faces/cli/bench/measurement.h"
#include "faces/cli/parse.h"
#include "muster/rpc.h"
#include "muster/spawn.h"

namespace {

namespace rpc = muster::rpc;
using muster::TemporaryFolder;
using muster::cli::bench::median;
using Clock = std::chrono::steady_clock;

/// Cases in the order in which they are measured; the workers of both libraries know them by these
/// names. Microseconds, or calls a second.
const std::vector<std::string> kCases{
    "empty",  "empty, pooled", "empty, asleep", "1 KiB",        "1 MiB",
    "64 MiB", "1 in flight",   "4 in flight",   "16 in flight", "64 in flight"};

struct Options {
  std::vector<std::string> versus;
  int rounds = 3;
  bool quick = false;
  std::string json;
};

using Figures = std::map<std::string, double>;

template <class Call>
double median_us(int calls, Call call) {
  std::vector<double> times;
  for (int i = 0; i < std::min(calls, calls / 10 + 3); ++i) call();
  for (int i = 0; i < calls; ++i) {
    const auto start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  return median(times);
}

double calls_a_second(int in_flight, int calls) {
  const auto some = [&](int count) {
    std::deque<rpc::Future<void>> window;
    for (int i = 0; i < count; ++i) {
      if (static_cast<int>(window.size()) == in_flight) {
        window.front().wait();
        window.pop_front();
      }
      window.push_back(rpc::rpc_async("callee", "nothing"));
    }
    for (const auto& future : window) future.wait();
  };
  some(calls / 10);
  const auto start = Clock::now();
  some(calls);
  return calls / std::chrono::duration<double>(Clock::now() - start).count();
}

void measure(bool quick, const std::string& file) {
  const int many = quick ? 50 : 5000;
  Figures figures;
  figures["empty"] = median_us(many, [] { rpc::rpc_sync("callee", "nothing"); });
  figures["empty, pooled"] = median_us(many / 5, [] { rpc::rpc_sync("callee", "nothing_pooled"); });
  std::vector<double> asleep;
  for (int i = 0; i < many / 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto start = Clock::now();
    rpc::rpc_sync("callee", "nothing");
    asleep.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  figures["empty, asleep"] = median(asleep);
  const auto echo = [](std::int64_t bytes, int calls) {
    const auto tensor = torch::ones({bytes / 4});
    return median_us(calls, [&] { rpc::rpc_sync<at::Tensor>("callee", "echo", tensor); });
  };
  figures["1 KiB"] = echo(1 << 10, many / 2);
  figures["1 MiB"] = echo(1 << 20, many / 10);
  figures["64 MiB"] = echo(64 << 20, quick ? 1 : 15);
  for (const int in_flight : {1, 4, 16, 64})
    figures[std::to_string(in_flight) + " in flight"] = calls_a_second(in_flight, 4 * many);
  std::ofstream out(file);
  for (const auto& [name, figure] : figures) out << name << '\t' << figure << '\n';
}

void worker(int rank, bool shared_memory, bool quick, const std::string& folder) {
  at::set_num_threads(1);
  rpc::register_function("nothing", [] {}, {.runs = rpc::Runs::at_once});
  rpc::register_function("nothing_pooled", [] {});
  rpc::register_function("echo", [](at::Tensor tensor) { return tensor; },
                         {.runs = rpc::Runs::at_once});
  rpc::RpcBackendOptions options;
  options.init_method = "file://" + folder + "/meet";
  options.shared_memory = shared_memory;
  rpc::init_rpc(rank == 0 ? "caller" : "callee",
                {.rank = rank, .world_size = 2, .rpc_backend_options = options});
  if (rank == 0) measure(quick, folder + "/result");
  rpc::shutdown();
}

Figures read_figures(std::istream& in) {
  Figures figures;
  for (std::string line; std::getline(in, line);) {
    const auto tab = line.find('\t');
    if (tab != std::string::npos)
      figures[line.substr(0, tab)] = std::strtod(line.c_str() + tab, nullptr);
  }
  return figures;
}

Figures run_ours(bool shared_memory, const Options& options) {
  const TemporaryFolder folder("muster-bench-");
  muster::spawn(worker, std::tuple(shared_memory, options.quick, folder.path()), {.nprocs = 2});
  std::ifstream in(folder.path() + "/result");
  return read_figures(in);
}

Figures run_stock(muster_bench::Stock& stock, bool quick) {
  const TemporaryFolder folder("muster-bench-");
  std::vector<std::string> arguments{"--folder", folder.path()};
  if (quick) arguments.emplace_back("--quick");
  if (!stock.run(arguments)) return {};
  std::ifstream in(folder.path() + "/result");
  return read_figures(in);
}

}  // namespace

int main(int count, char** words) {
  Options options;
  muster_bench::Stock stock("stock_rpc_worker.py");
  CLI::App app(
      "Times calls between two processes of this host: an empty function that is run at once, on "
      "the pool, and after 5 ms of silence; "
      "echoes of\n"
      "tensors; calls a second with several in flight. Medians, microseconds; one thread each.",
      "muster-lab rpc");
  app.add_option("--vs", options.versus, "also measure: torch (stock RPC)")
      ->delimiter(',')
      ->check(CLI::IsMember({"torch"}));
  app.add_option("--rounds", options.rounds, "how often everything is repeated, in turn")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_flag("--quick", options.quick, "few calls: to see that it works");
  stock.add_option(app);
  app.add_option("--json", options.json,
                 "also append the rows to this file, one JSON object a line");
  if (const auto stop = muster::cli::parse(app, {words + 1, words + count})) return *stop;

  std::map<std::string, std::map<std::string, std::vector<double>>> all;  // by library, by case
  const auto add = [&](const std::string& library, const Figures& figures) {
    for (const auto& [name, figure] : figures) all[library][name].push_back(figure);
  };
  for (int round = 0; round < options.rounds; ++round) {
    add("muster", run_ours(true, options));
    add("muster, sockets", run_ours(false, options));
    if (!options.versus.empty()) add("torch", run_stock(stock, options.quick));
  }
  std::printf("%-16s %-8s", "case", "unit");
  for (const auto& [library, figures] : all) std::printf(" %16s", library.c_str());
  std::printf(options.versus.empty() ? "\n" : " %14s\n", "torch/muster");
  for (const auto& name : kCases) {
    const bool rate = name.find("in flight") != std::string::npos;
    std::printf("%-16s %-8s", name.c_str(), rate ? "calls/s" : "us");
    for (auto& [library, figures] : all) {
      if (figures[name].empty()) {
        std::printf(" %16s", "-");
      } else {
        std::printf(" %16.1f", median(figures[name]));
      }
    }
    auto& stock = all["torch"][name];
    auto& ours = all["muster"][name];
    if (!stock.empty() && !ours.empty())
      std::printf(" %14.1f", rate ? median(ours) / median(stock) : median(stock) / median(ours));
    std::printf("\n");
    if (options.json.empty()) continue;
    std::ofstream file(options.json, std::ios::app);
    for (auto& [library, figures] : all) {
      if (figures[name].empty()) continue;
      file << R"({"bench":"rpc","case":")" << name << R"(","library":")" << library << R"(",")"
           << (rate ? "calls_per_s" : "p50_us") << R"(":)" << median(figures[name])
           << R"(,"rounds":)" << options.rounds << "}\n";
    }
  }
  return 0;
}
