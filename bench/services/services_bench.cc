// SPDX-License-Identifier: BSD-3-Clause
// The services around the collectives, each beside stock torch's in the same run: requests to a
// store, starting a job, making groups, launching programs. Also the cost of a group that does
// nothing.
//
//   muster_bench_services store|group|launch|idle [options]

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../forked.h"
#include "../stock.h"
#include "core/base/process/temporary_folder.h"
#include "faces/cli/bench/measurement.h"
#include "faces/cli/bench/timed_library.h"
#include "faces/cli/parse.h"
#include "lab/bench/programs.h"
#include "muster/distributed.h"

namespace {

namespace bench = muster::cli::bench;
using muster::TemporaryFolder;
using muster::cli::bench::median;
using muster_bench::Board;
using muster_bench::Clock;
using muster_bench::in_processes;
using muster_bench::kMostRanks;
using muster_bench::meet;
using muster_bench::microseconds;
using muster_bench::Stock;

struct Options {
  std::vector<int> counts;
  int rounds = 3;
  double seconds = 0.5;
  std::string json;
};

/// Microseconds that stock torch takes for `what`; negative where there is no figure.
double time_stock(Stock& stock, const std::string& what, int count, double seconds) {
  const TemporaryFolder folder("muster-bench-");
  const auto said = stock.run({what, "--count", std::to_string(count), "--seconds",
                               std::to_string(seconds), "--folder", folder.path()});
  double figure = -1;
  return said && std::sscanf(said->c_str(), "%lf", &figure) == 1 ? figure : -1;
}

/// Mean time of a get, of the slowest client.
double time_gets(int clients, double seconds) {
  muster::TCPStore server("127.0.0.1", 0, {.is_master = true, .wait_for_workers = false});
  server.set("key", "a value");
  const int port = server.port();
  return in_processes(clients, [&](int rank, Board& board) {
    muster::TCPStore client("127.0.0.1", port, {.wait_for_workers = false});
    for (int i = 0; i < 20; ++i) client.get("key");
    meet(board, clients);
    const auto start = Clock::now(), end = start + std::chrono::duration_cast<Clock::duration>(
                                                       std::chrono::duration<double>(seconds));
    int calls = 0;
    for (; Clock::now() < end; ++calls) client.get("key");
    board.figures[rank] = microseconds(Clock::now() - start) / calls;
  });
}

double time_init(int ranks, const std::string& method) {
  return in_processes(ranks, [&](int rank, Board& board) {
    meet(board, ranks);
    const auto start = Clock::now();
    muster::init_process_group({.init_method = method, .world_size = ranks, .rank = rank});
    board.figures[rank] = microseconds(Clock::now() - start);
    muster::destroy_process_group();
  });
}

/// As launchers do it: rank 0 serves the store.
double time_init_over_tcp(int ranks) {
  const int port =
      muster::TCPStore("127.0.0.1", 0, {.is_master = true, .wait_for_workers = false}).port();
  return time_init(ranks, "tcp://127.0.0.1:" + std::to_string(port));
}

double time_init_over_a_file(int ranks) {
  const TemporaryFolder folder("muster-bench-");
  return time_init(ranks, "file://" + folder.path() + "/store");
}

double time_new_group(int ranks) {
  const TemporaryFolder folder("muster-bench-");
  return in_processes(ranks, [&](int rank, Board& board) {
    muster::init_process_group(
        {.init_method = "file://" + folder.path() + "/store", .world_size = ranks, .rank = rank});
    std::vector<double> times;
    for (int i = 0; i < 11; ++i) {
      muster::barrier();
      const auto start = Clock::now();
      const auto group = muster::new_group();
      times.push_back(microseconds(Clock::now() - start));
    }
    board.figures[rank] = median(times);
    muster::destroy_process_group();
  });
}

/// From the launcher's start to its end, of a Python program that does nothing, on every rank.
double time_launch(Stock& stock, int ranks) {
  if (!stock.python()) return -1;
  const TemporaryFolder folder("muster-bench-");
  std::ofstream(folder.path() + "/nothing.py") << "\n";
  const std::vector<std::string> command{bench::program_beside("muster"),
                                         "run",
                                         "--standalone",
                                         "--nproc-per-node",
                                         std::to_string(ranks),
                                         *stock.python(),
                                         folder.path() + "/nothing.py"};
  const auto start = Clock::now();
  const auto ended = muster::lab::run_program(command, muster::lab::Complaints::shown);
  if (!ended) std::fprintf(stderr, "muster-lab launch: %s\n", ended.status().message().c_str());
  return ended ? microseconds(Clock::now() - start) : -1;
}

double processor_ms() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

/// Processor time that a rank of an idle group takes in `seconds`, in milliseconds; of the one that
/// takes most.
double time_idle(int ranks, double seconds) {
  const TemporaryFolder folder("muster-bench-");
  return in_processes(ranks, [&](int rank, Board& board) {
    muster::init_process_group(
        {.init_method = "file://" + folder.path() + "/store", .world_size = ranks, .rank = rank});
    auto tensor = at::ones({1024});
    for (int i = 0; i < 100; ++i) muster::all_reduce(tensor);
    muster::barrier();
    const double before = processor_ms();
    ::usleep(static_cast<useconds_t>(seconds * 1e6));
    board.figures[rank] = processor_ms() - before;
    muster::destroy_process_group();
  });
}

/// A rank comes 50 ms late, again and again. How long after it the others are through, in
/// microseconds, or what processor time one wait takes them, in milliseconds; medians, of the
/// slowest.
double time_late(int ranks, bool processor) {
  const TemporaryFolder folder("muster-bench-");
  return in_processes(ranks, [&](int rank, Board& board) {
    muster::init_process_group(
        {.init_method = "file://" + folder.path() + "/store", .world_size = ranks, .rank = rank});
    auto tensor = at::ones({2});
    std::vector<double> delays, costs;
    for (int round = 0; round < 21; ++round) {
      muster::barrier();
      const double before = processor_ms();
      if (rank == ranks - 1) {
        ::usleep(50'000);
        board.came = Clock::now().time_since_epoch().count();
      }
      muster::all_reduce(tensor);
      delays.push_back(microseconds(Clock::now().time_since_epoch() - Clock::duration(board.came)));
      costs.push_back(processor_ms() - before);
    }
    if (rank != ranks - 1) board.figures[rank] = processor ? median(costs) : median(delays);
    muster::destroy_process_group();
  });
}

int print_idle(const Options& options, double seconds) {
  std::printf(
      "%6s %32s %26s %28s\n", "ranks",
      ("idle for " + std::to_string(static_cast<int>(seconds)) + " s: processor ms").c_str(),
      "50 ms late: processor ms", "through after it came, us");
  for (const int ranks : options.counts) {
    const double idle = time_idle(ranks, seconds), cost = time_late(ranks, true),
                 delay = time_late(ranks, false);
    if (idle < 0 || cost < 0 || delay < 0) return 1;
    std::printf("%6d %32.1f %26.2f %28.1f\n", ranks, idle, cost, delay);
    std::fflush(stdout);
    if (options.json.empty()) continue;
    std::ofstream(options.json, std::ios::app)
        << R"({"bench":"idle","count":)" << ranks << R"(,"seconds":)" << seconds
        << R"(,"idle_cpu_ms":)" << idle << R"(,"late_cpu_ms":)" << cost << R"(,"late_us":)" << delay
        << "}\n";
  }
  return 0;
}

struct Line {
  std::string what;
  std::function<double(int count)> ours;
  std::string stock;  ///< the stock worker's name of it
};

int compare(const Options& options, Stock& stock, const std::string& counted,
            const std::vector<Line>& lines) {
  std::printf("%-24s %8s %14s %14s   times as fast\n", "", counted.c_str(), "muster us",
              "stock us");
  for (const Line& line : lines) {
    for (const int count : options.counts) {
      std::vector<double> ours, theirs;
      for (int round = 0; round < options.rounds; ++round) {
        ours.push_back(line.ours(count));
        theirs.push_back(time_stock(stock, line.stock, count, options.seconds));
      }
      const double mine = median(ours), other = median(theirs);
      if (mine < 0) return 1;
      std::printf("%-24s %8d %14.1f", line.what.c_str(), count, mine);
      other > 0 ? std::printf(" %14.1f   %.1f\n", other, other / mine)
                : std::printf(" %14s\n", "-");
      std::fflush(stdout);
      if (options.json.empty()) continue;
      std::ofstream(options.json, std::ios::app)
          << R"({"bench":")" << line.stock << R"(","count":)" << count << R"(,"muster_us":)" << mine
          << R"(,"stock_us":)" << other << R"(,"rounds":)" << options.rounds << "}\n";
    }
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  Options options;
  Stock stock("stock_services.py");
  CLI::App app(
      "Times what stands around the collectives, beside stock torch's in the same run. "
      "Microseconds, medians of the rounds.",
      "muster-lab");
  app.require_subcommand(1);
  const auto add = [&](const char* name, const char* text, const char* counted) {
    auto* command = app.add_subcommand(name, text);
    command->add_option("--count", options.counts, counted)
        ->delimiter(',')
        ->check(CLI::Range(1, kMostRanks));
    command->add_option("--rounds", options.rounds, "how often everything is repeated, in turn")
        ->check(CLI::Range(1, 100));
    command->add_option("--seconds", options.seconds, "time of one measurement of a store")
        ->check(CLI::Range(0.01, 60.0));
    stock.add_option(*command);
    command->add_option("--json", options.json,
                        "also append the rows to this file, one JSON object a line");
    return command;
  };
  auto* store = add("store", "get from a TCPStore, by clients that are processes",
                    "clients, comma separated; 1,32");
  auto* group = add(
      "group",
      "init_process_group, over TCP and over a file, until the last rank is through, and new_group",
      "ranks, comma separated; 2,16,32");
  add("launch", "muster run beside torchrun, of a Python program that does nothing",
      "ranks, comma separated; 2");
  double idle_seconds = 10;
  auto* idle = app.add_subcommand(
      "idle", "what a group costs that does nothing, and one that waits for a rank that is late");
  idle->add_option("--count", options.counts, "ranks, comma separated; 2")
      ->delimiter(',')
      ->check(CLI::Range(2, kMostRanks));
  idle->add_option("--seconds", idle_seconds, "how long nothing is done")
      ->check(CLI::Range(0.1, 600.0))
      ->capture_default_str();
  idle->add_option("--json", options.json,
                   "also append the rows to this file, one JSON object a line");
  if (const auto stop = muster::cli::parse(app, {words + 1, words + count})) return *stop;
  const auto otherwise = [&](std::vector<int> counts) {
    if (options.counts.empty()) options.counts = std::move(counts);
  };
  if (store->parsed()) {
    otherwise({1, 32});
    return compare(
        options, stock, "clients",
        {{"get", [&](int clients) { return time_gets(clients, options.seconds); }, "get"}});
  }
  if (group->parsed()) {
    otherwise({2, 16, 32});
    return compare(options, stock, "ranks",
                   {{"init_process_group", time_init_over_tcp, "init"},
                    {"the same over a file", time_init_over_a_file, "init_file"},
                    {"new_group", time_new_group, "new_group"}});
  }
  otherwise({2});
  if (idle->parsed()) return print_idle(options, idle_seconds);
  return compare(options, stock, "ranks",
                 {{"launch", [&](int ranks) { return time_launch(stock, ranks); }, "launch"}});
}
