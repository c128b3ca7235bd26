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

#include "core/base/process/file_limit.h"
#include "core/base/process/temporary_folder.h"
#include "core/tunables/tunables.h"
#include "core/wait/topology.h"
#include "faces/cli/bench/contestant.h"
#include "faces/cli/bench/progress_line.h"
#include "faces/cli/bench/results.h"

namespace muster::cli::bench {
namespace {

using collective::Algorithm;
using collective::Medium;
using collective::Op;
using collective::Selection;
using collective::Tuning;

Medium ground_of(const std::string& transport) {
  return transport == "tcp" ? Medium::network : Medium::shared_memory;
}

/// Those that one host can try: sums from host to host need several. And of two that send the same
/// messages one: between two ranks each side of a ring is straight to the other.
std::vector<Algorithm> rivals(Medium medium, Op op, int ranks) {
  const auto row = algorithms_of(medium, op);
  std::vector<Algorithm> here;
  std::copy_if(row.begin(), row.end(), std::back_inserter(here), [ranks](Algorithm algorithm) {
    return algorithm != Algorithm::hosts && (algorithm != Algorithm::ring || ranks > 2);
  });
  return here;
}

/// Whether its algorithms send the same messages: up to three ranks stand right below a tree's
/// root, or are it.
bool all_alike(Op op, int ranks) { return (op == Op::gather || op == Op::scatter) && ranks < 4; }

/// One operation on so many ranks, by every algorithm that it has; all stand ready and take turns.
class Race {
 public:
  static Result<std::unique_ptr<Race>> prepare(const Contest& contest, const std::string& transport,
                                               Op op, int ranks) {
    std::unique_ptr<Race> race(new Race(contest, transport, op, ranks));
    if (race->folder_.path().empty())
      return Status(Code::exhausted, "no folder could be made for temporary files");
    Field field;
    field.ranks = ranks;
    field.transport = transport;
    field.threads = contest.threads;
    field.tensors =
        false;  // the engine alone: what stands above it costs the same whatever the algorithm
    for (const Algorithm algorithm : rivals(race->medium_, op, ranks)) {
      const std::string name(name_of(algorithm));
      const std::string own = race->folder_.path() + "/" + name;
      std::filesystem::create_directory(own);
      auto plan = plan_start("muster", field, own);
      if (!plan) return plan.status();
      plan->environment.emplace_back("MUSTER_TUNING", "off");
      plan->environment.emplace_back("MUSTER_ALGORITHM",
                                     std::string(collective::info(op).name) + ":" + name);
      auto started = Contestant::start(*plan, ranks, own);
      if (!started)
        return started.status().with_context("starting " + name + " for " + race->title());
      race->runners_.emplace_back(algorithm, std::move(*started));
    }
    // The first cell waits until all ranks have started, so that no measurement overlaps with the
    // start of others.
    Cell ready;
    ready.op = "barrier";
    ready.seconds = contest.seconds / 20;
    for (auto& [algorithm, contestant] : race->runners_) {
      const CellResult answer = contestant->play(ready);
      if (answer.figures) continue;
      return Status(Code::internal, "starting " + std::string(name_of(algorithm)) + " for " +
                                        race->title() + ": " + answer.reason);
    }
    return race;
  }

  /// Every algorithm that can do calls of this size, once. Which of them comes first depends on
  /// `turn`.
  Result<Lap> look(std::uint64_t bytes, std::size_t turn) {
    Lap lap{bytes, {}};
    std::vector<std::size_t> able;
    for (std::size_t i = 0; i < runners_.size(); ++i) {
      if (bytes <= most_bytes(medium_, op_, runners_[i].first, ranks_)) able.push_back(i);
    }
    if (able.size() < 2) return lap;
    const Cell cell{std::string(collective::info(op_).name),
                    bytes,
                    contest_.dtype,
                    contest_.memory,
                    contest_.seconds,
                    settling_of(ranks_)};
    for (std::size_t i = 0; i < able.size(); ++i) {
      auto& [algorithm, contestant] = runners_[able[(i + turn) % able.size()]];
      const CellResult answer = contestant->play(cell);
      if (!answer.figures)
        return Status(Code::internal, title() + ", " + size_text(bytes) + ", by " +
                                          std::string(name_of(algorithm)) + ": " + answer.reason);
      Row row;
      row.cell = cell;
      row.figures = *answer.figures;
      lap.us.emplace(algorithm, compared(row));
    }
    return lap;
  }

  /// A look for each round. None where only one algorithm can do calls of this size.
  Result<std::vector<Lap>> run(std::uint64_t bytes) {
    std::vector<Lap> laps;
    for (int round = 0; round < contest_.rounds; ++round) {
      auto lap = look(bytes, static_cast<std::size_t>(round));
      if (!lap) return lap.status();
      if (lap->us.size() >= 2) laps.push_back(std::move(*lap));
    }
    return laps;
  }

  const std::string& transport() const { return transport_; }
  std::string title() const {
    return std::string(collective::info(op_).name) + ", " + std::to_string(ranks_) +
           " ranks over " + std::string(name_of(medium_));
  }
  Medium medium() const { return medium_; }

 private:
  Race(const Contest& contest, const std::string& transport, Op op, int ranks)
      : contest_(contest),
        transport_(transport),
        medium_(ground_of(transport)),
        op_(op),
        ranks_(ranks) {}

  const Contest& contest_;
  const std::string transport_;
  const Medium medium_;
  const Op op_;
  const int ranks_;
  const TemporaryFolder folder_{"muster-bench-"};
  std::vector<std::pair<Algorithm, std::unique_ptr<Contestant>>> runners_;
};

/// Calls `work(race, op, ranks)` for everything that has a choice.
template <class Work>
Status for_each_race(const Contest& contest, const Work& work) {
  bool any = false;
  for (const std::string& transport : contest.transports) {
    for (const int ranks : contest.ranks) {
      for (const std::string& name : contest.ops) {
        const auto op = collective::op_named(name);
        if (!op || ranks < 2 || rivals(ground_of(transport), *op, ranks).size() < 2 ||
            all_alike(*op, ranks))
          continue;
        any = true;
        auto race = Race::prepare(contest, transport, *op, ranks);
        if (!race) return race.status();
        if (Status done = work(**race, *op, ranks); !done) return done;
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

std::size_t laps_in(const Contest& contest) {
  std::size_t laps = 0;
  for (const std::string& transport : contest.transports) {
    for (const std::string& name : contest.ops) {
      const auto op = collective::op_named(name);
      for (const int ranks : contest.ranks) {
        if (op && rivals(ground_of(transport), *op, ranks).size() >= 2 && !all_alike(*op, ranks))
          laps += contest.sizes.size();
      }
    }
  }
  return laps;
}

std::string lap_text(Op op, int ranks, Medium medium, const Lap& lap) {
  char head[96];
  std::snprintf(head, sizeof head, "%-11s %4d ranks  %-6s %8s",
                std::string(collective::info(op).name).c_str(), ranks,
                std::string(name_of(medium)).c_str(), size_text(lap.bytes).c_str());
  std::string text = head;
  for (const auto& [algorithm, us] : lap.us) {
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

void Lap::take_less(const Lap& other) {
  for (const auto& [algorithm, time] : other.us) {
    const auto known = us.emplace(algorithm, time).first;
    known->second = std::min(known->second, time);
  }
}

std::vector<Tuning::SizeLimit> fit(std::span<const Algorithm> row, const std::vector<Lap>& laps) {
  constexpr double kImpossible = 1e6;  // the logarithm of a time
  // least[k]: of the laps so far, with the k-th algorithm at the last of them; from[lap][k]: the
  // one before it.
  std::vector<double> least(row.size(), 0);
  std::vector<std::vector<std::size_t>> from;
  for (const Lap& lap : laps) {
    std::vector<double> next(row.size());
    std::vector<std::size_t> came(row.size());
    std::size_t best = 0;  // of those that may come before
    for (std::size_t k = 0; k < row.size(); ++k) {
      if (least[k] < least[best]) best = k;
      const auto found = lap.us.find(row[k]);
      came[k] = best;
      next[k] = least[best] + (found == lap.us.end() ? kImpossible : std::log(found->second));
    }
    least = std::move(next);
    from.push_back(std::move(came));
  }
  std::vector<std::size_t> ways(laps.size());
  std::size_t way =
      static_cast<std::size_t>(std::min_element(least.begin(), least.end()) - least.begin());
  for (std::size_t lap = laps.size(); lap-- > 0;) {
    ways[lap] = way;
    way = from[lap][way];
  }
  std::vector<Tuning::SizeLimit> rule;
  for (std::size_t lap = 0; lap < laps.size(); ++lap) {
    if (!rule.empty() && rule.back().algorithm == row[ways[lap]]) continue;
    if (!rule.empty()) rule.back().up_to = between(laps[lap - 1].bytes, laps[lap].bytes);
    rule.push_back({row[ways[lap]]});
  }
  return rule;
}

Lap middle_of(const std::vector<Lap>& laps) {
  std::map<Algorithm, std::vector<double>> times;
  for (const Lap& lap : laps) {
    for (const auto& [algorithm, us] : lap.us) times[algorithm].push_back(us);
  }
  Lap middle{laps.empty() ? 0 : laps.front().bytes, {}};
  for (auto& [algorithm, us] : times) middle.us.emplace(algorithm, median(std::move(us)));
  return middle;
}

AlgorithmVerdict judge(const std::vector<Lap>& laps, Algorithm selected, double tolerance) {
  std::map<Algorithm, std::vector<double>> times_as_fast;
  for (const Lap& lap : laps) {
    const auto own = lap.us.find(selected);
    if (own == lap.us.end()) continue;
    for (const auto& [algorithm, us] : lap.us) {
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
    if (middle > tolerance && (!verdict.upset || middle > verdict.upset->times))
      verdict.upset = Upset{algorithm, middle};
  }
  return verdict;
}

Status tune(const Contest& contest, const std::string& path) {
  auto tuning = tuning_in(path);
  if (!tuning) return tuning.status();
  ProgressLine progress(laps_in(contest));
  const Status raced = for_each_race(contest, [&](Race& race, Op op, int ranks) {
    std::vector<Lap> laps;
    for (const std::uint64_t bytes : contest.sizes) {
      progress.next(race.title() + ", " + size_text(bytes));
      auto rounds = race.run(bytes);
      progress.clear();
      if (!rounds) return rounds.status();
      if (rounds->empty()) continue;
      Lap lap{bytes, {}};
      for (const Lap& round : *rounds) lap.take_less(round);
      print_line(lap_text(op, ranks, race.medium(), lap));
      laps.push_back(std::move(lap));
    }
    if (laps.empty()) return Status();
    const auto row = rivals(race.medium(), op, ranks);
    auto rule = fit(row, laps);
    // Beyond what was measured the most scalable one goes on, where only it can.
    const std::uint64_t most = most_bytes(race.medium(), op, rule.back().algorithm, ranks);
    if (rule.back().algorithm != row.back() && most != Selection::kAlways) {
      rule.back().up_to = most;
      rule.push_back({row.back()});
    }
    tuning->rules[{race.medium(), op, ranks}] = std::move(rule);
    return Status();
  });
  if (!raced) return raced;
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

/// Of ranks that share cores one lap differs from the next by a quarter and more, and neither lucky
/// nor unlucky ones are to decide. These many for each round tell 10 % from 20 %; more than the
/// last number of them would take more than some six minutes for a cell.
constexpr std::size_t kFewestLapsAgain = 4, kMostLapsAgain = 100;
constexpr double kSuspicion = 1.05;

/// The agreed numbers of the table, and how many of the cells that each decides are right.
class Tally {
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

/// What is checked: an operation on so many ranks, at one size.
struct AlgorithmChoice {
  std::string transport;
  Op op;
  int ranks;
  std::uint64_t bytes;
  Algorithm selected;
  std::vector<Lap> laps;

  /// Prints it; whether the selected algorithm is good enough.
  bool print(const std::string& remark) const {
    const AlgorithmVerdict verdict = judge(laps, selected);
    std::string line = lap_text(op, ranks, ground_of(transport), middle_of(laps)) +
                       " | selected: " + std::string(name_of(selected));
    if (verdict.upset) {
      char much[32];
      std::snprintf(much, sizeof much, "%.2f", verdict.upset->times);
      line += "  WRONG: " + std::string(name_of(verdict.upset->better)) + " is " + much +
              " times as fast";
    }
    print_line(line + remark);
    return !verdict.upset;
  }
};

/// Looks again at what seems wrong, by ranks started anew: where the system happens to run a race's
/// ranks is not what is asked. All in turn, so that the looks at one lie apart: a machine has
/// minutes in which its cores are near to each other, and others. How many are wrong.
Result<int> look_again(const Contest& contest, std::vector<AlgorithmChoice>& suspects,
                       Tally& tally) {
  const auto rounds = static_cast<std::size_t>(contest.rounds);
  int wrong = 0;
  for (std::size_t turn = 0; !suspects.empty(); ++turn) {
    ProgressLine progress(suspects.size());
    for (AlgorithmChoice& each : suspects) {
      auto race = Race::prepare(contest, each.transport, each.op, each.ranks);
      if (!race) return race.status();
      progress.next((*race)->title() + ", " + size_text(each.bytes) + ", look " +
                    std::to_string(turn + 1));
      auto lap = (*race)->look(each.bytes, turn);
      progress.clear();
      if (!lap) return lap.status();
      each.laps.push_back(std::move(*lap));
    }
    std::erase_if(suspects, [&](const AlgorithmChoice& each) {
      if (!looked_enough(each.laps, rounds, each.selected)) return false;
      const bool clear = judge(each.laps, each.selected).clear;
      const bool right = each.print("  (" + std::to_string(each.laps.size()) + " looks" +
                                    (clear ? ")" : ", not clear)"));
      tally.count(ground_of(each.transport), each.op, !right);
      wrong += right ? 0 : 1;
      return true;
    });
  }
  return wrong;
}

}  // namespace

bool looked_enough(const std::vector<Lap>& laps, std::size_t rounds, Algorithm selected) {
  if (laps.size() < kFewestLapsAgain * rounds) return false;
  return laps.size() >= kMostLapsAgain * rounds || judge(laps, selected).clear;
}

Status check_selection(const Contest& contest) {
  auto tuning = collective::tuning_of_environment();
  if (!tuning) return tuning.status();
  ProgressLine progress(laps_in(contest));
  int cells = 0;
  std::vector<AlgorithmChoice> suspects;
  Tally tally;
  const Status raced = for_each_race(contest, [&](Race& race, Op op, int ranks) {
    const Selection selection =
        select(*tuning, race.medium(), ranks,
               {.first_ranks = collective::even_hosts(ranks, ranks),
                .per_core = ranks_per_core(static_cast<std::size_t>(ranks), usable_cores())});
    for (const std::uint64_t bytes : contest.sizes) {
      progress.next(race.title() + ", " + size_text(bytes));
      auto laps = race.run(bytes);
      progress.clear();
      if (!laps) return laps.status();
      if (laps->empty()) continue;
      AlgorithmChoice choice{race.transport(), op, ranks, bytes, selection.choose(op, bytes),
                             std::move(*laps)};
      if (!choice.laps.front().us.contains(choice.selected)) {
        choice.print("  not measured: it sends what another one of these does");
        continue;
      }
      ++cells;
      if (judge(choice.laps, choice.selected, kSuspicion).upset) {
        print_line(lap_text(op, ranks, race.medium(), middle_of(choice.laps)) +
                   " | may be wrong, looked at again below");
        choice.laps.clear();  // they were chosen for being bad
        suspects.push_back(std::move(choice));
      } else {
        choice.print("");
        tally.count(race.medium(), op, false);
      }
    }
    return Status();
  });
  if (!raced) return raced;
  const auto wrong = look_again(contest, suspects, tally);
  if (!wrong) return wrong.status();
  tally.print();
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
