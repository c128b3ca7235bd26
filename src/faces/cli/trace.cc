// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/trace.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/environment.h"
#include "core/base/process/limits.h"
#include "core/security/own_files.h"
#include "core/store/factory.h"
#include "core/trace/responder.h"
#include "core/trace/run_directory.h"
#include "faces/cli/commands.h"
#include "faces/cli/json_line.h"
#include "faces/cli/parse.h"
#include "faces/cli/printable.h"
#include "jobs/launch/options.h"
#include "muster/clock.h"

namespace muster::cli {
namespace {

/// The store of a running job takes connections at once; this leaves room for a lost packet.
constexpr Duration kConnectLimit = std::chrono::seconds(4);
/// Asked of each rank over the store: `top` needs the calls of its window only, refreshed again and
/// again.
constexpr std::size_t kAllRecords = trace::kMostEntries, kRecordsOfTop = 500;

Result<launch::Endpoint> endpoint_of(const std::string& text) {
  auto endpoint = launch::parse_endpoint("--store", text);
  if (endpoint && !endpoint->port)
    return Status(Code::invalid_argument, "\"" + text + "\" has no port; write HOST:PORT");
  return endpoint;
}

/// The trace of a job to show, with notes on its sources.
struct Shown {
  trace::JobTrace job;
  std::vector<std::string> notes;
};

/// Which job is meant: by its files on this host, or through its store.
class TraceChoice {
 public:
  void add_to(CLI::App& app) {
    auto* pid_option = app.add_option("--pid", pid_, "the job that has this process as a rank")
                           ->type_name("PID")
                           ->check(whole_above_zero());
    auto* directory_option =
        app.add_option("--dir", directory_,
                       "the directory of a job's traces, or of several jobs (then the latest)")
            ->type_name("FOLDER")
            ->excludes(pid_option);
    auto* job_option = app.add_option("--job", name_,
                                      "the latest job of this name: its --rdzv-id, or what the "
                                      "first lines of a trace call it")
                           ->type_name("NAME")
                           ->excludes(pid_option)
                           ->excludes(directory_option);
    app.add_option("--store", store_text_,
                   "ask all ranks of the running job whose store is served there "
                   "(MASTER_ADDR:MASTER_PORT), whatever host they are on; "
                   "needs the job's secret, or its observers' key (`muster secret --observer`), in "
                   "MUSTER_SECRET or MUSTER_SECRET_FILE")
        ->type_name("HOST:PORT")
        ->check(CLI::Validator(
            [](const std::string& text) { return endpoint_of(text).status().message(); }, ""))
        ->excludes(pid_option)
        ->excludes(directory_option)
        ->excludes(job_option);
    app.add_option("--wait", wait_, "seconds to wait for ranks that do not answer (with --store)")
        ->check(CLI::Range(0.1, 3600.0))
        ->capture_default_str();
  }
  bool by_store() const { return !store_text_.empty(); }

  /// Finds the job, once; `records` are wanted of each rank. Without an option that selects
  /// one, it is the latest job, or the latest running one if `prefers_live`.
  Status find(std::size_t records, bool prefers_live) {
    ask_.records = records;
    ask_.patience = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait_));
    if (by_store()) return connect();
    const bool chosen = pid_ != 0 || !name_.empty() || !directory_.empty();
    const auto found = find_directory(prefers_live && !chosen);
    if (!found) return found.status();
    directory_ = *found;
    if (!chosen) note_other_jobs();
    return {};
  }
  Result<Shown> read() const {
    if (!by_store()) {
      auto job = trace::read_job(directory_);
      if (!job) return job.status();
      return Shown{std::move(*job), notes_};
    }
    auto asked = trace::ask_job(*store_, ask_);
    if (!asked) return asked.status();
    asked->job.directory = "the answers of the ranks to the store at " + store_text_;
    return Shown{std::move(asked->job), std::move(asked->notes)};
  }

 private:
  Result<std::string> find_directory(bool prefers_live) const {
    const std::string base = trace::run_directory();
    if (pid_ != 0) return trace::find_job_of(base, pid_);
    if (!name_.empty()) return trace::find_job_called(base, name_);
    if (prefers_live) {
      if (const auto live = trace::live_jobs_but(base, ""); !live.empty())
        return live.front().directory;
    }
    return trace::find_job(directory_.empty() ? base : directory_);
  }

  void note_other_jobs() {
    for (const auto& job : trace::live_jobs_but(trace::run_directory(), directory_)) {
      const auto& first = job.ranks.front();
      notes_.push_back("not shown: " + trace::title(job) +
                       ", which runs here too; choose it with --job " +
                       (first.run_id.empty() ? first.job : first.run_id));
    }
  }

  Status connect() {
    const auto endpoint = endpoint_of(store_text_);
    if (!endpoint) return endpoint.status();
    store::TcpStoreOptions options;
    options.role = Handshake::Role::observer;
    options.host = endpoint->host;
    options.port = *endpoint->port;
    options.timeout = kConnectLimit;
    auto store = store::make_tcp_store(std::move(options));
    wipe_env("MUSTER_SECRET");  // `top` may run for days
    if (!store) return store.status();
    store_ = std::move(*store);
    return {};
  }

  std::int64_t pid_ = 0;
  std::string directory_, store_text_, name_;
  std::vector<std::string> notes_;
  double wait_ = 2;
  trace::AskOptions ask_;
  std::shared_ptr<store::Store> store_;
};

int complain(const char* command, const std::string& text) {
  std::cerr << "muster " << command << ": " << printable(text) << "\n";
  return 1;
}

Status write_file(const std::string& path, const std::string& text) {
  const auto file =
      open_own_file(path, O_WRONLY | O_CREAT | O_TRUNC, {.name = "the output file"}, 0644);
  if (!file) return file.status();
  const FileSizeSignalBlock block;
  for (std::size_t written = 0; written < text.size();) {
    const ssize_t count = ::write(file->get(), text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      return Status(Code::exhausted, "cannot write " + path + ": " + errno_text(errno));
    written += static_cast<std::size_t>(count);
  }
  return {};
}

/// PATH, its ending .json or .html replaced by `ending`.
std::string with_ending(std::string path, const std::string& ending) {
  for (const char* known : {".json", ".html"}) {
    if (path.ends_with(known)) path.resize(path.size() - 5);
  }
  return path + ending;
}

std::string lines_of(const std::vector<std::string>& notes) {
  std::string text;
  for (const auto& note : notes) text += note + "\n";
  return text;
}

std::string scaled(double value) {
  static constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  int unit = 0;
  for (; value >= 999.5 && unit < 4; ++unit) value /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 && value < 10 ? "%.1f%s" : "%.3g%s", value,
                kUnits[unit]);
  return text;
}

struct TraceOptions {
  TraceChoice choice;
  std::string output;
  bool json = false;
};

int show_trace(TraceOptions& options) {
  auto& [choice, output, as_json] = options;
  if (const auto found = choice.find(kAllRecords, false); !found)
    return complain("trace", found.message());
  const auto shown = choice.read();
  if (!shown) return complain("trace", shown.status().message());
  const auto* job = &shown->job;
  std::cout << (as_json ? report_json(*job, shown->notes)
                        : printable(trace::summary(*job) + lines_of(shown->notes)));
  if (output.empty()) return 0;
  const std::string json = with_ending(output, ".json"), page = with_ending(output, ".html");
  for (const auto& [path, text] :
       {std::pair(json, timeline_json(*job)), std::pair(page, timeline_page(*job))})
    if (Status written = write_file(path, text); !written)
      return complain("trace", written.message());
  if (!as_json)
    std::cout << "written: " << json << " (open it in chrome://tracing or ui.perfetto.dev) and "
              << page << "\n";
  return 0;
}

}  // namespace

Command trace_command() {
  auto app = make_app("muster trace",
                      "The last calls of a job's ranks, live or dead: who is behind, and a "
                      "timeline.");
  auto options = std::make_shared<TraceOptions>();
  options->choice.add_to(*app);
  app->add_option("-o,--output", options->output,
                  "write FILE.json (Chrome, Perfetto) and FILE.html (a page of its own)")
      ->type_name("FILE");
  app->add_flag("--json", options->json, kJsonHelp);
  return make_command(app, [options] { return show_trace(*options); });
}

const trace::Record* in_flight(const trace::RankTrace& rank) {
  const trace::Record* longest = nullptr;
  for (const auto& record : rank.records) {
    if (record.under_way() && (longest == nullptr || record.start_ns < longest->start_ns))
      longest = &record;
  }
  return longest;
}

std::string top_table(const trace::JobTrace& job) {
  const std::int64_t now = job.now_ns();
  std::string out = printable_line(trace::title(job) + ": " + std::to_string(job.world_size()) +
                                   " ranks, " + std::to_string(job.ranks.size()) + " shown; " +
                                   trace::headline(job, trace::find_holdups(job))) +
                    "\n";
  char line[256];
  std::snprintf(line, sizeof line, "%5s %8s %-8s %6s %8s %8s  %s\n", "rank", "pid", "process",
                "wait", "calls/s", "bytes/s", "in flight");
  out += line;
  for (const auto& rank : job.ranks) {
    const auto rates = trace::rates_of(rank, now, kRateWindow);
    const bool gone = rank.life == trace::Life::gone;
    std::snprintf(line, sizeof line, "%5d %8lld %-8s %5.0f%% %8s %8s  ", rank.rank,
                  static_cast<long long>(rank.pid), trace::name_of(rank.life),
                  gone ? 0 : rates.busy * 100, scaled(gone ? 0 : rates.operations).c_str(),
                  scaled(gone ? 0 : rates.bytes).c_str());
    out += line;
    const auto* record = in_flight(rank);
    out += record == nullptr ? "-" : printable_line(trace::describe(*record, rank, now, true));
    out += "\n";
    if (rank.failures > 0)
      out += "        last error: " + printable(rank.failure.substr(0, rank.failure.find('\n'))) +
             "\n";
  }
  return out;
}

namespace {

/// One screen of `muster top`, and whether anything can still change on it.
std::pair<std::string, bool> screen_of(const Shown& shown, bool all_hosts) {
  std::string text = top_table(shown.job);
  if (!all_hosts && static_cast<int>(shown.job.ranks.size()) < shown.job.world_size())
    text +=
        "ranks of other hosts are not shown; give --store MASTER_ADDR:MASTER_PORT, with the job's "
        "secret or its observers' key in the environment\n";
  const auto& ranks = shown.job.ranks;
  const bool over = std::all_of(ranks.begin(), ranks.end(),
                                [](const auto& rank) { return rank.life == trace::Life::gone; });
  return {text + printable(lines_of(shown.notes)), !over};
}

struct TopOptions {
  TraceChoice choice;
  bool once = false, json = false;
  double interval = 1;
};

int show_top(TopOptions& options) {
  TraceChoice& choice = options.choice;
  const bool once = options.once;
  if (const auto found = choice.find(kRecordsOfTop, true); !found)
    return complain("top", found.message());
  for (bool first = true;; first = false) {
    const auto shown = choice.read();
    if (!shown && first) return complain("top", shown.status().message());
    if (!shown && options.json) return 0;
    if (!shown) {
      std::cout << (choice.by_store()
                        ? printable("the job does not answer any more: " + shown.status().message())
                        : "the job has ended and has left no traces: all is well")
                << "\n";
      return 0;
    }
    const auto [text, goes_on] = screen_of(*shown, choice.by_store());
    if (!once && !options.json && ::isatty(1) != 0) std::cout << "\033[H\033[2J";
    std::cout << (options.json ? report_json(shown->job, shown->notes) : text) << std::flush;
    if (once || !goes_on || !std::cout) return 0;
    const auto pause = static_cast<std::int64_t>(options.interval * 1e9);
    const timespec span{static_cast<time_t>(pause / 1'000'000'000),
                        static_cast<long>(pause % 1'000'000'000)};
    ::nanosleep(&span, nullptr);
  }
}

}  // namespace

Command top_command() {
  auto app = make_app(
      "muster top",
      "What a job's ranks are in, refreshed: this host's, or with --store all. \"wait\" is the "
      "share of the last 5 s with a call under way.");
  auto options = std::make_shared<TopOptions>();
  options->choice.add_to(*app);
  app->add_flag("--once", options->once, "print one table and end");
  app->add_option("--interval", options->interval, "seconds between two tables")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app->add_flag("--json", options->json, kJsonHelp);
  return make_command(app, [options] { return show_top(*options); });
}

}  // namespace muster::cli
