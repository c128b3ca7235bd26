// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/bench/algorithms.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <sstream>

#include "core/base/process/limits.h"
#include "core/base/process/temporary_folder.h"
#include "core/tunables/tunables.h"
#include "core/wait/topology.h"
#include "faces/cli/bench/results.h"
#include "faces/cli/bench/timed_library.h"

namespace muster::cli::bench {
namespace {

using collective::Algorithm;
using collective::Medium;
using collective::Op;
using collective::Selection;
using collective::Tuning;

Medium medium_of(const std::string& transport) {
  return transport == "tcp" ? Medium::network : Medium::shared_memory;
}

/// The algorithms that one host can measure: `hosts` needs several. A ring of two ranks is left
/// out, because it sends the same messages as a direct exchange.
std::vector<Algorithm> candidates(Medium medium, Op op, int ranks) {
  const auto row = algorithms_of(medium, op);
  std::vector<Algorithm> here;
  std::copy_if(row.begin(), row.end(), std::back_inserter(here), [ranks](Algorithm algorithm) {
    return algorithm != Algorithm::hosts && (algorithm != Algorithm::ring || ranks > 2);
  });
  return here;
}

/// Whether its algorithms send the same messages: with up to three ranks, all stand directly below
/// a tree's root.
bool all_alike(Op op, int ranks) { return (op == Op::gather || op == Op::scatter) && ranks < 4; }

/// One operation on so many ranks, by every algorithm that it has; all stand ready and take turns.
class AlgorithmComparison {
 public:
  static Result<std::unique_ptr<AlgorithmComparison>> prepare(const ComparisonOptions& options,
                                                              const std::string& transport, Op op,
                                                              int ranks) {
    std::unique_ptr<AlgorithmComparison> comparison(
        new AlgorithmComparison(options, transport, op, ranks));
    if (comparison->folder_.path().empty())
      return Status(Code::exhausted, "no folder could be made for temporary files");
    RankOptions rank_options;
    rank_options.ranks = ranks;
    rank_options.transport = transport;
    rank_options.threads = options.threads;
    rank_options.tensors =
        false;  // the engine alone: what stands above it costs the same whatever the algorithm
    for (const Algorithm algorithm : candidates(comparison->medium_, op, ranks)) {
      const std::string name(name_of(algorithm));
      const std::string own = comparison->folder_.path() + "/" + name;
      std::filesystem::create_directory(own);
      StartPlan plan = plan_muster(rank_options, own);
      plan.environment.emplace_back("MUSTER_TUNING", "off");
      plan.environment.emplace_back("MUSTER_ALGORITHM",
                                    std::string(collective::info(op).name) + ":" + name);
      auto started = TimedLibrary::start(plan, ranks, own);
      if (!started)
        return started.status().with_context("starting " + name + " for " + comparison->title());
      comparison->runners_.emplace_back(algorithm, std::move(*started));
    }
    // The first cell waits until all ranks have started, so that no measurement overlaps with the
    // start of others.
    Cell ready;
    ready.op = "barrier";
    ready.seconds = options.seconds / 20;
    for (auto& [algorithm, library] : comparison->runners_) {
      const CellResult answer = library->measure(ready);
      if (answer.figures) continue;
      return Status(Code::internal, "starting " + std::string(name_of(algorithm)) + " for " +
                                        comparison->title() + ": " + answer.reason);
    }
    return comparison;
  }

  /// Every algorithm that can do calls of this size, once. Which of them comes first depends on
  /// `turn`.
  Result<AlgorithmTimes> measure_once(std::uint64_t bytes, std::size_t turn) {
    AlgorithmTimes times{bytes, {}};
    std::vector<std::size_t> able;
    for (std::size_t i = 0; i < runners_.size(); ++i) {
      if (bytes <= most_bytes(medium_, op_, runners_[i].first, ranks_)) able.push_back(i);
    }
    if (able.size() < 2) return times;
    const Cell cell{std::string(collective::info(op_).name),
                    bytes,
                    options_.dtype,
                    options_.memory,
                    options_.seconds,
                    settling_of(ranks_)};
    for (std::size_t i = 0; i < able.size(); ++i) {
      auto& [algorithm, library] = runners_[able[(i + turn) % able.size()]];
      const CellResult answer = library->measure(cell);
      if (!answer.figures)
        return Status(Code::internal, title() + ", " + size_text(bytes) + ", by " +
                                          std::string(name_of(algorithm)) + ": " + answer.reason);
      Row row;
      row.cell = cell;
      row.figures = *answer.figures;
      times.us.emplace(algorithm, compared(row));
    }
    return times;
  }

  /// A measurement for each round; none if only one algorithm can do calls of this size.
  Result<std::vector<AlgorithmTimes>> run(std::uint64_t bytes) {
    std::vector<AlgorithmTimes> measurements;
    for (int round = 0; round < options_.rounds; ++round) {
      auto times = measure_once(bytes, static_cast<std::size_t>(round));
      if (!times) return times.status();
      if (times->us.size() >= 2) measurements.push_back(std::move(*times));
    }
    return measurements;
  }

  const std::string& transport() const { return transport_; }
  std::string title() const {
    return std::string(collective::info(op_).name) + ", " + std::to_string(ranks_) +
           " ranks over " + std::string(name_of(medium_));
  }
  Medium medium() const { return medium_; }

 private:
  AlgorithmComparison(const ComparisonOptions& options, const std::string& transport, Op op,
                      int ranks)
      : options_(options),
        transport_(transport),
        medium_(medium_of(transport)),
        op_(op),
        ranks_(ranks) {}

  const ComparisonOptions& options_;
  const std::string transport_;
  const Medium medium_;
  const Op op_;
  const int ranks_;
  const TemporaryFolder folder_{"muster-bench-"};
  std::vector<std::pair<Algorithm, std::unique_ptr<TimedLibrary>>> runners_;
};

/// Calls `work(comparison, op, ranks)` for everything that has a choice.
template <class Work>
Status for_each_comparison(const ComparisonOptions& options, const Work& work) {
  bool any = false;
  for (const std::string& transport : options.transports) {
    for (const int ranks : options.ranks) {
      for (const std::string& name : options.ops) {
        const auto op = collective::op_named(name);
        if (!op || ranks < 2 || candidates(medium_of(transport), *op, ranks).size() < 2 ||
            all_alike(*op, ranks))
          continue;
        any = true;
        auto comparison = AlgorithmComparison::prepare(options, transport, *op, ranks);
        if (!comparison) return comparison.status();
        if (Status done = work(**comparison, *op, ranks); !done) return done;
      }
    }
  }
  if (any) return {};
  return Status(Code::invalid_argument,
                "none of these operations has more than one algorithm there; over tcp broadcast, "
                "all_reduce, reduce and "
                "all_gather have, over shm all_reduce and reduce, with at least two ranks, and "
                "over tcp gather and scatter with at least "
                "four");
}

std::size_t cells_of(const ComparisonOptions& options) {
  std::size_t cells = 0;
  for (const std::string& transport : options.transports) {
    for (const std::string& name : options.ops) {
      const auto op = collective::op_named(name);
      for (const int ranks : options.ranks) {
        if (op && candidates(medium_of(transport), *op, ranks).size() >= 2 &&
            !all_alike(*op, ranks))
          cells += options.sizes.size();
      }
    }
  }
  return cells;
}

std::string times_text(Op op, int ranks, Medium medium, const AlgorithmTimes& times) {
  char head[96];
  std::snprintf(head, sizeof head, "%-11s %4d ranks  %-6s %8s",
                std::string(collective::info(op).name).c_str(), ranks,
                std::string(name_of(medium)).c_str(), size_text(times.bytes).c_str());
  std::string text = head;
  for (const auto& [algorithm, us] : times.us) {
    char part[64];
    std::snprintf(part, sizeof part, " | %s %.4g", std::string(name_of(algorithm)).c_str(), us);
    text += part;
  }
  return text;
}

void print_line(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

/// Half-way on a scale of factors.
std::uint64_t between(std::uint64_t low, std::uint64_t high) {
  return static_cast<std::uint64_t>(
      std::sqrt(static_cast<double>(std::max<std::uint64_t>(low, 1))) *
      std::sqrt(static_cast<double>(high)));
}

Result<Tuning> tuning_in(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Tuning();
  std::ostringstream text;
  text << file.rdbuf();
  return collective::parse_tuning(text.str(), "tuning file " + path);
}

}  // namespace

void AlgorithmTimes::take_less(const AlgorithmTimes& other) {
  for (const auto& [algorithm, time] : other.us) {
    const auto known = us.emplace(algorithm, time).first;
    known->second = std::min(known->second, time);
  }
}

std::vector<Tuning::SizeLimit> fit(std::span<const Algorithm> row,
                                   const std::vector<AlgorithmTimes>& measurements) {
  constexpr double kImpossible = 1e6;  // the logarithm of a time
  // least[k]: of the measurements so far, with the k-th algorithm at the last of them; from[i][k]:
  // the one before it.
  std::vector<double> least(row.size(), 0);
  std::vector<std::vector<std::size_t>> from;
  for (const AlgorithmTimes& times : measurements) {
    std::vector<double> next(row.size());
    std::vector<std::size_t> came(row.size());
    std::size_t best = 0;  // of those that may come before
    for (std::size_t k = 0; k < row.size(); ++k) {
      if (least[k] < least[best]) best = k;
      const auto found = times.us.find(row[k]);
      came[k] = best;
      next[k] = least[best] + (found == times.us.end() ? kImpossible : std::log(found->second));
    }
    least = std::move(next);
    from.push_back(std::move(came));
  }
  std::vector<std::size_t> ways(measurements.size());
  std::size_t way =
      static_cast<std::size_t>(std::min_element(least.begin(), least.end()) - least.begin());
  for (std::size_t i = measurements.size(); i-- > 0;) {
    ways[i] = way;
    way = from[i][way];
  }
  std::vector<Tuning::SizeLimit> rule;
  for (std::size_t i = 0; i < measurements.size(); ++i) {
    if (!rule.empty() && rule.back().algorithm == row[ways[i]]) continue;
    if (!rule.empty())
      rule.back().up_to = between(measurements[i - 1].bytes, measurements[i].bytes);
    rule.push_back({row[ways[i]]});
  }
  return rule;
}

AlgorithmTimes middle_of(const std::vector<AlgorithmTimes>& measurements) {
  std::map<Algorithm, std::vector<double>> times;
  for (const AlgorithmTimes& measurement : measurements) {
    for (const auto& [algorithm, us] : measurement.us) times[algorithm].push_back(us);
  }
  AlgorithmTimes middle{measurements.empty() ? 0 : measurements.front().bytes, {}};
  for (auto& [algorithm, us] : times) middle.us.emplace(algorithm, median(std::move(us)));
  return middle;
}

AlgorithmVerdict judge(const std::vector<AlgorithmTimes>& measurements, Algorithm selected,
                       double tolerance) {
  std::map<Algorithm, std::vector<double>> times_as_fast;
  for (const AlgorithmTimes& times : measurements) {
    const auto own = times.us.find(selected);
    if (own == times.us.end()) continue;
    for (const auto& [algorithm, us] : times.us) {
      if (algorithm != selected) times_as_fast[algorithm].push_back(own->second / us);
    }
  }
  AlgorithmVerdict verdict;
  for (auto& [algorithm, times] : times_as_fast) {
    const auto all = static_cast<double>(times.size());
    const auto faster = static_cast<double>(
        std::ranges::count_if(times, [tolerance](double each) { return each > tolerance; }));
    // Twice the standard deviation of the number of heads among as many throws of a coin.
    if (std::abs(faster - all / 2) < std::sqrt(all)) verdict.clear = false;
    const double middle = median(std::move(times));
    if (middle > tolerance && (!verdict.faster || middle > verdict.faster->times))
      verdict.faster = FasterAlgorithm{algorithm, middle};
  }
  return verdict;
}

Status tune(const ComparisonOptions& options, const std::string& path) {
  auto tuning = tuning_in(path);
  if (!tuning) return tuning.status();
  ProgressLine progress(cells_of(options));
  const Status all_compared =
      for_each_comparison(options, [&](AlgorithmComparison& comparison, Op op, int ranks) {
        std::vector<AlgorithmTimes> measurements;
        for (const std::uint64_t bytes : options.sizes) {
          progress.next(comparison.title() + ", " + size_text(bytes));
          auto rounds = comparison.run(bytes);
          progress.clear();
          if (!rounds) return rounds.status();
          if (rounds->empty()) continue;
          AlgorithmTimes times{bytes, {}};
          for (const AlgorithmTimes& round : *rounds) times.take_less(round);
          print_line(times_text(op, ranks, comparison.medium(), times));
          measurements.push_back(std::move(times));
        }
        if (measurements.empty()) return Status();
        const auto row = candidates(comparison.medium(), op, ranks);
        auto rule = fit(row, measurements);
        // Beyond what was measured the most scalable one goes on, where only it can.
        const std::uint64_t most =
            most_bytes(comparison.medium(), op, rule.back().algorithm, ranks);
        if (rule.back().algorithm != row.back() && most != Selection::kAlways) {
          rule.back().up_to = most;
          rule.push_back({row.back()});
        }
        tuning->rules[{comparison.medium(), op, ranks}] = std::move(rule);
        return Status();
      });
  if (!all_compared) return all_compared;
  std::error_code ignored;
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty())
    std::filesystem::create_directories(folder, ignored);
  const std::string text = print_tuning(*tuning);
  const FileSizeSignalBlock block;
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file)
    return Status(Code::invalid_argument,
                  "cannot write " + path + "; say with --tune FILE where it should be");
  std::printf("\n%s\nwritten to %s\n", text.c_str(), path.c_str());
  return {};
}

namespace {

/// If ranks share cores, measurements of one algorithm differ by a quarter and more. The fewest for
/// each round tell 10 % from 20 %; the most take about six minutes for a cell.
constexpr std::size_t kFewestTimesAgain = 4, kMostTimesAgain = 100;
constexpr double kSuspicion = 1.05;

/// The agreed numbers of the table, and how many of the cells that each decides are right.
class RightCells {
 public:
  void count(Medium medium, Op op, bool wrong) {
    const std::string operation =
        std::string(name_of(medium)) + "." + std::string(collective::info(op).name);
    for (const Tunable* row : tunables_deciding(operation)) {
      auto& [cells, bad] = rows_[row];
      ++cells;
      bad += wrong ? 1 : 0;
    }
  }
  void print() const {
    for (const Tunable& row : tunable_rows()) {
      if (row.scope != Tunable::TunableScope::agreed) continue;
      const auto found = rows_.find(&row);
      const auto [cells, bad] = found == rows_.end() ? std::pair(0, 0) : found->second;
      print_line("tunable " + std::string(row.name) + " (" +
                 text_of(row, value_of(row, tunables(), false)) + "): " +
                 (cells == 0 ? "not measured here; " + std::string(row.bench)
                             : std::to_string(cells - bad) + " of " + std::to_string(cells) +
                                   " cells that it decides are right"));
    }
  }

 private:
  std::map<const Tunable*, std::pair<int, int>> rows_;
};

/// The choice that is checked: the algorithm of an operation on so many ranks, at one size.
struct AlgorithmChoice {
  std::string transport;
  Op op;
  int ranks;
  std::uint64_t bytes;
  Algorithm selected;
  std::vector<AlgorithmTimes> measurements;

  /// Prints it; whether the selected algorithm is good enough.
  bool print(const std::string& remark) const {
    const AlgorithmVerdict verdict = judge(measurements, selected);
    std::string line = times_text(op, ranks, medium_of(transport), middle_of(measurements)) +
                       " | selected: " + std::string(name_of(selected));
    if (verdict.faster) {
      char much[32];
      std::snprintf(much, sizeof much, "%.2f", verdict.faster->times);
      line += "  WRONG: " + std::string(name_of(verdict.faster->better)) + " is " + much +
              " times as fast";
    }
    print_line(line + remark);
    return !verdict.faster;
  }
};

/// Measures again what seems wrong, by new ranks, because the cores on which the system ran the old
/// ones count too. All suspects take turns, so that the measurements of one lie minutes apart.
/// Returns how many are wrong.
Result<int> measure_again(const ComparisonOptions& options, std::vector<AlgorithmChoice>& suspects,
                          RightCells& right_cells) {
  const auto rounds = static_cast<std::size_t>(options.rounds);
  int wrong = 0;
  for (std::size_t turn = 0; !suspects.empty(); ++turn) {
    ProgressLine progress(suspects.size());
    for (AlgorithmChoice& each : suspects) {
      auto comparison = AlgorithmComparison::prepare(options, each.transport, each.op, each.ranks);
      if (!comparison) return comparison.status();
      progress.next((*comparison)->title() + ", " + size_text(each.bytes) + ", measurement " +
                    std::to_string(turn + 1));
      auto times = (*comparison)->measure_once(each.bytes, turn);
      progress.clear();
      if (!times) return times.status();
      each.measurements.push_back(std::move(*times));
    }
    std::erase_if(suspects, [&](const AlgorithmChoice& each) {
      if (!measured_enough(each.measurements, rounds, each.selected)) return false;
      const bool clear = judge(each.measurements, each.selected).clear;
      const bool right = each.print("  (" + std::to_string(each.measurements.size()) +
                                    " measurements" + (clear ? ")" : ", not clear)"));
      right_cells.count(medium_of(each.transport), each.op, !right);
      wrong += right ? 0 : 1;
      return true;
    });
  }
  return wrong;
}

}  // namespace

bool measured_enough(const std::vector<AlgorithmTimes>& measurements, std::size_t rounds,
                     Algorithm selected) {
  if (measurements.size() < kFewestTimesAgain * rounds) return false;
  return measurements.size() >= kMostTimesAgain * rounds || judge(measurements, selected).clear;
}

Status check_selection(const ComparisonOptions& options) {
  auto tuning = collective::tuning_of_environment();
  if (!tuning) return tuning.status();
  ProgressLine progress(cells_of(options));
  int cells = 0;
  std::vector<AlgorithmChoice> suspects;
  RightCells right_cells;
  const Status all_compared = for_each_comparison(options, [&](AlgorithmComparison& comparison,
                                                               Op op, int ranks) {
    const Selection selection =
        select(*tuning, comparison.medium(), ranks,
               {.first_ranks = collective::even_hosts(ranks, ranks),
                .per_core = ranks_per_core(static_cast<std::size_t>(ranks), usable_cores())});
    for (const std::uint64_t bytes : options.sizes) {
      progress.next(comparison.title() + ", " + size_text(bytes));
      auto measurements = comparison.run(bytes);
      progress.clear();
      if (!measurements) return measurements.status();
      if (measurements->empty()) continue;
      AlgorithmChoice choice{comparison.transport(),  op, ranks, bytes, selection.choose(op, bytes),
                             std::move(*measurements)};
      if (!choice.measurements.front().us.contains(choice.selected)) {
        choice.print("  not measured: it sends what another one of these does");
        continue;
      }
      ++cells;
      if (judge(choice.measurements, choice.selected, kSuspicion).faster) {
        print_line(times_text(op, ranks, comparison.medium(), middle_of(choice.measurements)) +
                   " | may be wrong, measured again below");
        choice.measurements.clear();  // they were chosen for being bad
        suspects.push_back(std::move(choice));
      } else {
        choice.print("");
        right_cells.count(comparison.medium(), op, false);
      }
    }
    return Status();
  });
  if (!all_compared) return all_compared;
  const auto wrong = measure_again(options, suspects, right_cells);
  if (!wrong) return wrong.status();
  right_cells.print();
  if (*wrong == 0) {
    print_line("the selected algorithm is within 10 % of the best in all " + std::to_string(cells) +
               " cells");
    return {};
  }
  return Status(Code::internal, "in " + std::to_string(*wrong) + " of " + std::to_string(cells) +
                                    " cells another algorithm is more than 10 % faster than the "
                                    "selected one; on a quiet machine "
                                    "muster bench --tune finds better limits");
}

}  // namespace muster::cli::bench
