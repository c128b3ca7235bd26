#include "muster/cli/trace.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>

#include "muster/base/clock.h"
#include "muster/trace/run_directory.h"

namespace muster::cli {
namespace {

constexpr std::int64_t kWindow = 5'000'000'000;

/// Which job is meant.
struct Choice {
  std::int64_t pid = 0;
  std::string directory;

  void add_to(CLI::App& app) {
    auto* pid_option = app.add_option("--pid", pid, "the job that has this process as a rank")->check(CLI::PositiveNumber);
    app.add_option("--dir", directory, "the directory of a job's traces, or of several jobs (then the latest)")->excludes(pid_option);
  }
  Result<std::string> find() const {
    if (pid != 0) return trace::find_job_of(trace::run_directory(), pid);
    return trace::find_job(directory.empty() ? trace::run_directory() : directory);
  }
};

int complain(const char* command, const std::string& text) {
  std::cerr << "muster " << command << ": " << text << "\n";
  return 1;
}

/// Zero where the arguments are fine; else what to exit with, plus one.
int parse(CLI::App& app, std::vector<std::string> arguments) {
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return 1 + (app.exit(error) == 0 ? 0 : 2);
  }
  return 0;
}

bool write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  return file.flush().good();
}

/// PATH, its ending .json or .html replaced by `ending`.
std::string with_ending(std::string path, const std::string& ending) {
  for (const char* known : {".json", ".html"}) {
    if (path.ends_with(known)) path.resize(path.size() - 5);
  }
  return path + ending;
}

/// Text as it may go to a terminal: a trace holds words of other programs.
std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) out += (static_cast<unsigned char>(c) < 32 && c != '\n') || c == 127 ? ' ' : c;
  return out;
}

std::string scaled(double value) {
  static constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  int unit = 0;
  for (; value >= 999.5 && unit < 4; ++unit) value /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 && value < 10 ? "%.1f%s" : "%.3g%s", value, kUnits[unit]);
  return text;
}

/// The call that a rank has been in longest.
const trace::Record* in_flight(const trace::RankTrace& rank) {
  const trace::Record* longest = nullptr;
  for (const auto& record : rank.records) {
    if (record.under_way() && (longest == nullptr || record.start_ns < longest->start_ns)) longest = &record;
  }
  return longest;
}

}  // namespace

int run_trace(const std::vector<std::string>& arguments) {
  CLI::App app{"The last calls of a job's ranks, live or dead: who is behind, and a timeline.", "muster trace"};
  Choice choice;
  choice.add_to(app);
  std::string output;
  app.add_option("-o,--output", output, "write FILE.json (Chrome, Perfetto) and FILE.html (a page of its own)")->type_name("FILE");
  if (const int stop = parse(app, arguments); stop != 0) return stop - 1;
  const auto directory = choice.find();
  if (!directory) return complain("trace", directory.status().message());
  const auto job = trace::read_job(*directory);
  if (!job) return complain("trace", job.status().message());
  std::cout << printable(trace::summary(*job));
  if (output.empty()) return 0;
  const std::string json = with_ending(output, ".json"), page = with_ending(output, ".html");
  if (!write_file(json, timeline_json(*job))) return complain("trace", "cannot write " + json);
  if (!write_file(page, timeline_page(*job))) return complain("trace", "cannot write " + page);
  std::cout << "written: " << json << " (open it in chrome://tracing or ui.perfetto.dev) and " << page << "\n";
  return 0;
}

std::string top_table(const trace::JobTrace& job) {
  const std::int64_t now = job.now_ns();
  std::string out = printable("job " + job.ranks.front().job + ": " + std::to_string(job.world_size()) + " ranks, " +
                              std::to_string(job.ranks.size()) + " on this host; " + trace::headline(job, trace::find_holdups(job))) +
                    "\n";
  char line[256];
  std::snprintf(line, sizeof line, "%5s %8s %-8s %6s %8s %8s  %s\n", "rank", "pid", "process", "wait", "calls/s", "bytes/s", "in flight");
  out += line;
  for (const auto& rank : job.ranks) {
    const auto rates = trace::rates_of(rank, now, kWindow);
    const bool gone = rank.life == trace::Life::gone;
    std::snprintf(line, sizeof line, "%5d %8lld %-8s %5.0f%% %8s %8s  ", rank.rank, static_cast<long long>(rank.pid),
                  trace::name_of(rank.life), gone ? 0 : rates.busy * 100, scaled(gone ? 0 : rates.operations).c_str(),
                  scaled(gone ? 0 : rates.bytes).c_str());
    out += line;
    const auto* record = in_flight(rank);
    out += record == nullptr ? "-" : printable(trace::describe(*record, rank, now, true));
    out += "\n";
    if (rank.failures > 0) out += "        last error: " + printable(rank.failure.substr(0, rank.failure.find('\n'))) + "\n";
  }
  if (static_cast<int>(job.ranks.size()) < job.world_size()) out += "ranks of other hosts are not shown; run `muster top` there\n";
  return out;
}

int run_top(const std::vector<std::string>& arguments) {
  CLI::App app{"What this host's ranks of a job are in, refreshed. \"wait\" is the share of the last 5 s with a call under way.",
               "muster top"};
  Choice choice;
  choice.add_to(app);
  bool once = false;
  double interval = 1;
  app.add_flag("--once", once, "print one table and end");
  app.add_option("--interval", interval, "seconds between two tables")->check(CLI::Range(0.1, 3600.0))->capture_default_str();
  if (const int stop = parse(app, arguments); stop != 0) return stop - 1;
  const auto directory = choice.find();
  if (!directory) return complain("top", directory.status().message());
  for (bool first = true;; first = false) {
    const auto job = trace::read_job(*directory);
    if (!job && first) return complain("top", job.status().message());
    if (!job) {
      std::cout << "the job has ended and has left no traces: all is well\n";
      return 0;
    }
    if (!once && ::isatty(1) != 0) std::cout << "\033[H\033[2J";
    std::cout << top_table(*job) << std::flush;
    const bool over = std::all_of(job->ranks.begin(), job->ranks.end(), [](const auto& rank) { return rank.life == trace::Life::gone; });
    if (once || over || !std::cout) return 0;
    const auto pause = static_cast<std::int64_t>(interval * 1e9);
    const timespec span{static_cast<time_t>(pause / 1'000'000'000), static_cast<long>(pause % 1'000'000'000)};
    ::nanosleep(&span, nullptr);
  }
}

}  // namespace muster::cli
