// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/bench/timing_run.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/base/dtype.h"
#include "core/base/process/limits.h"
#include "core/base/process/temporary_folder.h"
#include "faces/cli/bench/results.h"

namespace muster::cli::bench {
namespace {

/// Every worker of muster's knows these.
std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kReducibleDTypes; ++i) names.emplace_back(name_of(static_cast<DType>(i)));
  return names;
}

/// Other names of what rows call by one.
const std::map<std::string, std::string> kTransports = {{"auto", "shm"}},
                                         kMemories = {{"shared", "arena"}};

std::vector<std::uint64_t> sizes_of(const TimingOptions& options, const std::string& op) {
  return op == "barrier" ? std::vector<std::uint64_t>{0} : options.sizes;
}

class TimingRun {
 public:
  TimingRun(const TimingOptions& options, const Libraries& libraries)
      : options_(options), libraries_(libraries), names_{"muster"}, progress_(number_of_cells()) {
    names_.insert(names_.end(), libraries.others.begin(), libraries.others.end());
  }

  Result<std::vector<Row>> run() {
    std::printf("%s", table_head(names_).c_str());
    for (const int ranks : options_.ranks) {
      if (Status measured = measure_groups_of(ranks); !measured) return measured;
    }
    if (Status written = write_json(); !written) return written;
    const bool measured = std::ranges::any_of(rows_, [](const Row& row) {
      return row.library == "muster" && row.figures.iterations > 0;
    });
    if (!measured)
      return Status(Code::unsupported,
                    "muster could run nothing of this; the reasons are said above");
    return std::move(rows_);
  }

 private:
  std::size_t number_of_cells() const {
    std::size_t cells = 0;
    for (const std::string& op : options_.ops) cells += sizes_of(options_, op).size();
    std::size_t measurements = 0;
    for (const int ranks : options_.ranks) {
      measurements += options_.memories.size();
      for (const std::string& library : libraries_.others)
        measurements += why_left_out(library, ranks).empty() ? 1 : 0;
    }
    return cells * measurements * static_cast<std::size_t>(rounds());
  }
  int rounds() const {
    return options_.rounds > 0 ? options_.rounds : libraries_.others.empty() ? 1 : 3;
  }
  std::string why_left_out(const std::string& library, int ranks) const {
    return libraries_.why_left_out ? libraries_.why_left_out(library, ranks) : "";
  }

  /// All libraries are started at the same time and take turns; those that wait sleep.
  Status measure_groups_of(int ranks) {
    const TemporaryFolder folder("muster-bench-");
    if (folder.path().empty())
      return Status(Code::exhausted, "no folder could be made for temporary files");
    RankOptions rank_options = options_.rank;
    rank_options.ranks = ranks;
    std::vector<std::unique_ptr<TimedLibrary>> started;
    for (const std::string& library : names_) {
      if (const std::string why = why_left_out(library, ranks); !why.empty()) {
        complain_once(library, why);
        continue;
      }
      const std::string own = folder.path() + "/" + library;
      std::filesystem::create_directory(own);
      auto plan = libraries_.plan(library, rank_options, own);
      if (!plan) return plan.status();
      engine_ = engine_ || plan->engine;
      transports_[library] = plan->transport.empty() ? options_.rank.transport : plan->transport;
      auto ready = TimedLibrary::start(*plan, ranks, own);
      if (!ready) return ready.status().with_context("starting " + library);
      started.push_back(std::move(*ready));
    }
    for (const std::string& op : options_.ops) {
      for (const std::uint64_t bytes : sizes_of(options_, op)) {
        const Cell cell{op, bytes, options_.dtype, "private", options_.seconds, settling_of(ranks)};
        if (Status measured = measure_cell(started, ranks, cell); !measured) return measured;
      }
    }
    return {};
  }

  /// muster with each of its memories, the others once: a round after the other.
  Status measure_cell(std::vector<std::unique_ptr<TimedLibrary>>& started, int ranks,
                      const Cell& cell) {
    std::map<std::pair<std::string, std::string>, std::vector<Figures>>
        figures;  // by library and memory
    std::map<std::string, std::string> reasons;
    for (int round = 0; round < rounds(); ++round) {
      for (const auto& each : started) {
        const std::string& library = each->library();
        for (const std::string& memory : memories_of(library)) {
          progress_.next(cell.op + " " + size_text(cell.bytes) + ", " + std::to_string(ranks) +
                         " ranks, " + library);
          Cell own = cell;
          own.memory = memory;
          const CellResult answer = each->measure(own);
          if (answer.figures) {
            figures[{library, memory}].push_back(*answer.figures);
            continue;
          }
          reasons.try_emplace(library, answer.reason);
          if (!answer.skipped && library == "muster") {
            return Status(Code::internal, cell.op + " of " + std::to_string(cell.bytes) +
                                              " bytes: " + answer.reason);
          }
        }
      }
    }
    std::vector<Row> rows;
    for (const std::string& library : names_) {
      for (const std::string& memory : memories_of(library)) {
        Cell own = cell;
        own.memory = memory;
        rows.push_back(summarize(
            library, own, ranks,
            transports_.contains(library) ? transports_[library] : options_.rank.transport,
            figures[{library, memory}]));
        rows.back().no_figures = reasons[library];
        rows.back().engine = library == "muster" && engine_;
        rows.back().threads = library == "muster" && options_.rank.threads;
      }
    }
    compare(rows);
    progress_.clear();
    std::printf("%s", table_lines(rows).c_str());
    std::fflush(stdout);
    for (const auto& [library, reason] : reasons) complain_once(library, reason);
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    return {};
  }

  const std::vector<std::string>& memories_of(const std::string& library) const {
    static const std::vector<std::string> others = {"private"};
    return library == "muster" ? options_.memories : others;
  }

  void complain_once(const std::string& library, const std::string& reason) {
    if (!reason.empty() && complaints_.insert(library + reason).second)
      std::fprintf(stderr, "%s: %s\n", library.c_str(), reason.c_str());
  }

  Status write_json() const {
    if (options_.json.empty()) return {};
    const FileSizeSignalBlock block;
    std::ofstream file(options_.json, std::ios::app);
    for (const Row& row : rows_) {
      if (row.figures.iterations > 0) file << json(row) << "\n";
    }
    file.close();
    return file ? Status() : Status(Code::invalid_argument, "cannot write " + options_.json);
  }

  const TimingOptions& options_;
  const Libraries& libraries_;
  std::vector<std::string> names_;
  ProgressLine progress_;
  std::vector<Row> rows_;
  std::map<std::string, std::string> transports_;  // by library, of those that have been started
  std::set<std::string> complaints_;
  bool engine_ = false;  // what is timed of muster is the engine alone
};

}  // namespace

const std::vector<std::string>& known_operations() {
  static const std::vector<std::string> names = {
      "broadcast", "all_reduce",     "reduce",     "all_gather", "gather",
      "scatter",   "reduce_scatter", "all_to_all", "barrier",    "ping_pong"};
  return names;
}

void add_timing_options(CLI::App& app, TimingOptions& options) {
  app.add_option("--op", options.ops, "operations, comma separated")
      ->delimiter(',')
      ->check(CLI::IsMember(known_operations()))
      ->capture_default_str();
  app.add_option("--sizes,--bytes", options.sizes,
                 "bytes, comma separated; 64KiB and 1MiB are understood")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "numbers of ranks, comma separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "element type, as torch calls it")
      ->check(CLI::IsMember(dtype_names()))
      ->capture_default_str();
  app.add_option("--transport", options.rank.transport,
                 "shm, or auto (what muster takes between ranks of a host: shm), or tcp")
      ->transform(CLI::Transformer(kTransports))
      ->check(CLI::IsMember({"shm", "tcp"}))
      ->capture_default_str();
  app.add_option("--memory", options.memories,
                 "of muster's ranks, comma separated, each a measurement: private, arena or shared "
                 "(both: shared between the ranks of a host), or allocator (ordinary tensors, with "
                 "the shared allocator)")
      ->delimiter(',')
      ->transform(CLI::Transformer(kMemories))
      ->check(CLI::IsMember({"private", "arena", "allocator"}))
      ->capture_default_str();
  app.add_flag("--threads", options.rank.threads, "muster's ranks as threads of one process");
  app.add_flag("!--engine", options.rank.tensors,
               "time the engine below the tensors, without recorder and validation");
  app.add_option("--seconds", options.seconds, "time of the loops of one cell")
      ->check(CLI::Range(0.01, 60.0))
      ->capture_default_str();
  app.add_option("--json", options.json,
                 "also append the rows to this file, one JSON object a line");
}

std::string why_not_here(const TimingOptions& options) {
  if (*std::ranges::max_element(options.ranks) > 128)
    return "at most 128 ranks can be started here";
  return {};
}

Result<std::vector<Row>> time_libraries(const TimingOptions& options, const Libraries& libraries) {
  return TimingRun(options, libraries).run();
}

}  // namespace muster::cli::bench
