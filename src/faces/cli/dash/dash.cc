// SPDX-License-Identifier: BSD-3-Clause
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <utility>

#include "core/base/threads/thread_start.h"
#include "core/security/secret.h"
#include "faces/cli/commands.h"
#include "faces/cli/dash/dash_page.h"
#include "faces/cli/dash/dash_replies.h"
#include "faces/cli/dash/dash_server.h"
#include "faces/cli/printable.h"

namespace muster::cli {
namespace {

/// Asked of each rank over the store, again and again. Files are read whole.
constexpr std::size_t kRecordsOfDash = 500;

struct DashOptions {
  TraceChoice choice;
  DashPlaces places;
  std::uint16_t port = 0;
  bool until_eof = false;
};

/// Finds logs and events in a folder that the user has named, as `muster run --log-dir FOLDER
/// --events FOLDER/events.jsonl` with MUSTER_RUN_DIR=FOLDER leaves it.
void find_places(const std::string& folder, DashPlaces& places) {
  if (folder.empty()) return;
  std::error_code ignored;
  if (places.logs.empty()) places.logs = folder;
  if (places.events.empty() && std::filesystem::exists(folder + "/events.jsonl", ignored))
    places.events = folder + "/events.jsonl";
}

/// Ends the process when standard input ends: the process that started it holds the other end.
void end_with_input() {
  char bytes[256];
  for (;;) {
    const ssize_t count = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (count == 0 || (count < 0 && errno != EINTR)) ::_exit(0);
  }
}

int serve_dash(DashOptions& options) {
  find_places(options.choice.directory(), options.places);
  if (const Status found = options.choice.find(kRecordsOfDash, true); !found)
    return complain("dash", found.message());
  const auto job = std::make_shared<DashJob>(
      [&options] { return options.choice.read_latest(); }, std::chrono::seconds(1),
      [] {
        // Standard output may be a pipe whose reader wanted the address alone.
        std::cerr << "muster dash: the job has ended; the page shows it until this command is "
                     "stopped\n"
                  << std::flush;
      });
  if (const auto first = job->latest(); !first) return complain("dash", first.status().message());
  const auto replies = std::make_shared<DashReplies>(job, options.places);
  const std::string token = Secret::random_text().substr(kSecretPrefix.size(), 64);
  const auto server = DashServer::start(
      {.port = options.port,
       .token = token,
       .page = dash_page(),
       .reply = [replies](const DashQuery& query) { return replies->reply(query); }});
  if (!server) return complain("dash", server.status().message());
  std::cout << "muster dash: " << (*server)->url() << "#" << token << "\n" << std::flush;
  if (options.until_eof) {
    auto watch = start_thread("the thread that waits for the end of the input", end_with_input);
    if (!watch) return complain("dash", watch.status().message());
    watch->detach();
  }
  (*server)->wait();
  return complain("dash", "the page's port takes no more connections; start muster dash again");
}

}  // namespace

Command dash_command() {
  auto app = make_app("muster dash",
                      "A page of a job's ranks for a browser: what each does, who is late, a "
                      "timeline, stacks, logs "
                      "and restarts, live or after the end. It prints the address to open; what "
                      "stands behind its # "
                      "is the token without which nothing is shown.");
  auto options = std::make_shared<DashOptions>();
  options->choice.add_to(*app, "folder");
  app->add_option("--port", options->port, "of the loopback interface; 0 takes a free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  app->add_option("--logs", options->places.logs,
                  "the folder of the workers' logs, as `muster run --log-dir` has it; the named "
                  "folder itself by default")
      ->type_name("FOLDER");
  app->add_option("--events", options->places.events,
                  "the file of the job's events, as `muster run --events` has it; events.jsonl of "
                  "the named folder by default")
      ->type_name("FILE");
  app->add_flag("--until-eof", options->until_eof, "end when standard input does");
  return make_command(app, [options] { return serve_dash(*options); });
}

}  // namespace muster::cli
