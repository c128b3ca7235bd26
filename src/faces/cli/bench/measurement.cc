// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/bench/measurement.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/wait/topology.h"
#include "muster/clock.h"

namespace muster::cli::bench {
namespace {

constexpr std::string_view kFroms[] = {"last", "first", "own"};  // by CountFrom

}  // namespace

double settling_of(int ranks) { return ranks > usable_cores() ? 0.2 : 0; }

std::string encode(const Cell& cell) {
  std::ostringstream line;
  line << "cell " << cell.op << ' ' << cell.bytes << ' ' << cell.dtype << ' ' << cell.memory << ' '
       << cell.seconds << ' ' << cell.settling << ' ' << kFroms[static_cast<std::size_t>(cell.from)]
       << '\n';
  return line.str();
}

Result<std::optional<Cell>> decode_order(const std::string& line) {
  std::istringstream words(line);
  std::string kind, from;
  words >> kind;
  if (kind.empty() || kind == "quit") return std::optional<Cell>();
  Cell cell;
  if (kind == "cell" && words >> cell.op >> cell.bytes >> cell.dtype >> cell.memory >>
                            cell.seconds >> cell.settling >> from) {
    const auto* const found = std::find(std::begin(kFroms), std::end(kFroms), from);
    if (found != std::end(kFroms)) {
      cell.from = static_cast<CountFrom>(found - std::begin(kFroms));
      return std::optional(cell);
    }
  }
  return Status(Code::internal, "an order that this worker does not know: " + line);
}

std::string encode(const Figures& figures) {
  std::ostringstream line;
  line.precision(9);
  line << "row " << figures.loop_us << ' ' << figures.p50_us << ' ' << figures.min_us << ' '
       << figures.p99_us << ' ' << figures.iterations << '\n';
  return line.str();
}

CellResult decode_answer(const std::string& line) {
  std::istringstream words(line);
  std::string kind;
  words >> kind;
  Figures figures;
  if (kind == "row" && words >> figures.loop_us >> figures.p50_us >> figures.min_us >>
                           figures.p99_us >> figures.iterations) {
    return {figures, "", false};
  }
  const std::string rest = line.size() > kind.size() + 1 ? line.substr(kind.size() + 1) : "";
  if (kind == "skip") return {{}, rest, true};
  return {{}, kind == "error" ? rest : "it answered \"" + line + "\"", false};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

namespace {

constexpr int kLoops = 11;
// The loops if one call takes longer than kManyTimes the time meant for all: kLoops of them would
// take minutes.
constexpr int kFewLoops = 3;
constexpr double kManyTimes = 5;
constexpr std::int64_t kMostCalls = 200'000;
constexpr std::int64_t kMostSingles = 2000;

std::int64_t nanoseconds_now() { return steady_clock().now().time_since_epoch().count(); }

/// Writes the two stamps of a call on this rank. The maximum of each over all ranks gives its span.
void stamp_call(std::int64_t* stamps, std::int64_t start, std::int64_t end, CountFrom from) {
  stamps[0] = from == CountFrom::last_start ? start : from == CountFrom::first_start ? -start : 0;
  stamps[1] = from == CountFrom::own_start ? end - start : end;
}

/// In microseconds.
double span_of(const std::int64_t* latest, CountFrom from) {
  const std::int64_t start = from == CountFrom::first_start ? -latest[0] : latest[0];
  return static_cast<double>(latest[1] - start) / 1000;
}

/// A mean in microseconds, the same for all ranks: a root that only gives is through long before
/// the others.
Result<double> loop(TimedRank& rank, std::int64_t times, CountFrom from) {
  const MutableBytes written = rank.written();
  if (Status met = rank.barrier(); !met) return met;
  const std::int64_t start = nanoseconds_now();
  for (std::int64_t i = 0; i < times; ++i) {
    if (!written.empty()) std::memset(written.data(), 1, written.size());
    if (Status done = rank.call(); !done) return done;
  }
  std::int64_t stamps[2];
  stamp_call(stamps, start, nanoseconds_now(), from);
  if (Status done = rank.latest(stamps); !done) return done;
  return span_of(stamps, from) / static_cast<double>(times);
}

Status measure_singles(TimedRank& rank, std::int64_t times, CountFrom from, Figures& figures) {
  const MutableBytes written = rank.written();
  std::vector<std::int64_t> stamps(static_cast<std::size_t>(2 * times));
  for (std::size_t i = 0; i < stamps.size(); i += 2) {
    if (!written.empty()) std::memset(written.data(), 1, written.size());
    if (Status met = rank.barrier(); !met) return met;
    const std::int64_t start = nanoseconds_now();
    if (Status done = rank.call(); !done) return done;
    stamp_call(&stamps[i], start, nanoseconds_now(), from);
  }
  if (Status done = rank.latest(stamps); !done) return done;
  std::vector<double> spans;
  for (std::size_t i = 0; i < stamps.size(); i += 2) spans.push_back(span_of(&stamps[i], from));
  std::sort(spans.begin(), spans.end());
  figures.min_us = spans.front();
  figures.p50_us = spans[spans.size() / 2];
  figures.p99_us = spans[spans.size() * 99 / 100];
  return {};
}

void bind_to_a_core(const TimedRank& rank) {
  const auto cores = own_cores();
  if (usable_cores() < rank.size()) return;
  // If the system refuses to bind, it places the rank itself.
  static_cast<void>(bind_to_hardware_thread(cores[static_cast<std::size_t>(rank.rank())]));
}

Status say(int descriptor, const std::string& line) {
  return ::write(descriptor, line.data(), line.size()) == static_cast<ssize_t>(line.size())
             ? Status()
             : Status(Code::closed, "nobody reads the answers: " + errno_text(errno));
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.substr(0, 2000);  // shorter than what a pipe takes as one piece
}

}  // namespace

Result<Figures> measure(TimedRank& rank, const Cell& cell) {
  if (Status ready = rank.prepare(cell); !ready) return ready;
  const auto run_loop = [&](std::int64_t times) { return loop(rank, times, cell.from); };
  auto warm = run_loop(1);  // may be cold
  const auto second = run_loop(1);
  if (!warm || !second) return (warm ? second : warm).status();
  if (*second < *warm) warm = second;
  const auto calls_in = [&](double seconds, std::int64_t least, std::int64_t most) {
    return std::clamp(static_cast<std::int64_t>(seconds * 1e6 / std::max(*warm, 0.05)), least,
                      most);
  };
  std::int64_t in_time = calls_in(kManyTimes * cell.seconds, 0, 1);
  if (Status agreed = rank.share(in_time); !agreed) return agreed;
  const int rounds = in_time > 0 ? kLoops : kFewLoops;
  for (int i = 0; in_time > 0 && i < 2; ++i) {
    std::int64_t more = calls_in(cell.seconds / 4, 2, 20);
    if (Status agreed = rank.share(more); !agreed) return agreed;
    if (warm = run_loop(more); !warm) return warm.status();
  }
  // Loop after loop: how many calls that will be a first one tells badly.
  for (double settled = 0; settled < cell.settling;) {
    std::int64_t more = calls_in(cell.settling - settled, 1, kMostCalls);
    if (Status agreed = rank.share(more); !agreed) return agreed;
    if (warm = run_loop(more); !warm) return warm.status();
    settled += *warm * static_cast<double>(more) / 1e6;
  }
  std::int64_t times = calls_in(cell.seconds / kLoops, 1, kMostCalls);
  if (Status agreed = rank.share(times); !agreed) return agreed;
  std::vector<double> loops;
  for (int i = 0; i < rounds; ++i) {
    auto took = run_loop(times);
    if (!took) return took.status();
    loops.push_back(*took);
  }
  Figures figures;
  figures.loop_us = median(std::move(loops));
  std::int64_t singles = calls_in(cell.seconds / 2, rounds, kMostSingles);
  if (Status agreed = rank.share(singles); !agreed) return agreed;
  figures.iterations = static_cast<std::uint64_t>(times * rounds + singles);
  if (Status done = measure_singles(rank, singles, cell.from, figures); !done) return done;
  return figures;
}

Status serve(TimedRank& rank, const std::string& folder) {
  const bool piped = folder.empty();
  const Descriptor back(piped ? ::dup(STDOUT_FILENO)
                              : ::open((folder + "/back").c_str(), O_WRONLY | O_CLOEXEC));
  std::ifstream named;
  if (!piped) named.open(folder + "/to-" + std::to_string(rank.rank()));
  std::istream& orders = piped ? std::cin : named;
  if (!back || !orders)
    return Status(Code::invalid_argument, "there are no pipes for orders and answers in " + folder);
  bind_to_a_core(rank);
  for (std::string line; std::getline(orders, line);) {
    auto cell = decode_order(line);
    if (!cell) return cell.status();
    if (!*cell) return {};
    const auto figures = measure(rank, **cell);
    const bool skipped = !figures && figures.status().code() == Code::unsupported;
    if (!figures && !skipped)
      return say(back.get(), "error rank " + std::to_string(rank.rank()) + ", " + (*cell)->op +
                                 " of " + std::to_string((*cell)->bytes) +
                                 " bytes: " + one_line(figures.status().message()) + "\n");
    if (rank.rank() != 0) continue;
    if (Status said =
            say(back.get(),
                figures ? encode(*figures) : "skip " + one_line(figures.status().message()) + "\n");
        !said)
      return said;
  }
  return {};
}

}  // namespace muster::cli::bench
