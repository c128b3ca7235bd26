// SPDX-License-Identifier: BSD-3-Clause
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>
#include <memory>
#include <utility>

#include "core/base/environment.h"
#include "faces/cli/commands.h"
#include "faces/cli/json_line.h"
#include "faces/cli/printable.h"
#include "faces/cli/top/top_table.h"
#include "faces/cli/top/trace_choice.h"
#include "faces/cli/trace.h"

namespace muster::cli {
namespace {

/// Asked of each rank over the store: `top` needs the calls of its window only, refreshed again and
/// again.
constexpr std::size_t kRecordsOfTop = 500;

/// One screen of `muster top`, and whether anything can still change on it.
std::pair<std::string, bool> screen_of(const ShownJob& shown, bool all_hosts,
                                       const TopStyle& style) {
  std::string text = top_table(shown.job, style);
  if (!all_hosts && static_cast<int>(shown.job.ranks.size()) < shown.job.world_size())
    text +=
        "ranks of other hosts are not shown; give --store MASTER_ADDR:MASTER_PORT, with the job's "
        "secret or its observers' key in the environment\n";
  return {text + printable(shown.note_lines()), !trace::all_are_gone(shown.job)};
}

struct TopOptions {
  TraceChoice choice;
  bool once = false, json = false;
  double interval = 1;
  std::string order = "rank", colour = "auto";
};

/// That of the terminal as it is now; a file gets whole lines without colour.
TopStyle style_of(const TopOptions& options) {
  static const std::map<std::string, TopOrder> orders = {{"rank", TopOrder::rank},
                                                         {"wait", TopOrder::wait},
                                                         {"calls", TopOrder::calls},
                                                         {"bytes", TopOrder::bytes},
                                                         {"late", TopOrder::late}};
  TopStyle style;
  style.order = orders.at(options.order);
  winsize size{};
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  if (terminal && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) style.columns = size.ws_col;
  style.colour =
      options.colour == "always" || (options.colour == "auto" && terminal && !env_text("NO_COLOR"));
  return style;
}

int show_top(TopOptions& options) {
  TraceChoice& choice = options.choice;
  const bool once = options.once;
  if (const auto found = choice.find(kRecordsOfTop, true); !found)
    return complain("top", found.message());
  for (bool first = true;; first = false) {
    const auto shown = choice.read_latest();
    if (!shown && first) return complain("top", shown.status().message());
    if (!shown && options.json) return 0;
    if (!shown) {
      std::cout << (choice.by_store()
                        ? printable("the job does not answer any more: " + shown.status().message())
                        : "the job has ended and has left no traces: all is well")
                << "\n";
      return 0;
    }
    const auto [text, goes_on] = screen_of(*shown, choice.by_store(), style_of(options));
    if (!once && !options.json && ::isatty(STDOUT_FILENO) != 0) std::cout << "\033[H\033[2J";
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
      "share of the last 5 s with a call under way. Lines are cut to the terminal's width; ranks "
      "that others wait for are red.");
  auto options = std::make_shared<TopOptions>();
  options->choice.add_to(*app);
  app->add_flag("--once", options->once, "print one table and end");
  app->add_option("--sort", options->order,
                  "which rank comes first: the lowest, the one with the largest wait, calls/s or "
                  "bytes/s, or the one that is behind")
      ->check(CLI::IsMember({"rank", "wait", "calls", "bytes", "late"}))
      ->capture_default_str();
  app->add_option("--color,--colour", options->colour,
                  "auto: on a terminal, unless NO_COLOR is set")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  app->add_option("--interval", options->interval, "seconds between two tables")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app->add_flag("--json", options->json, kJsonHelp);
  return make_command(app, [options] { return show_top(*options); });
}

}  // namespace muster::cli
