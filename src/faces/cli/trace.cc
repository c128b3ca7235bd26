// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/trace.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <iostream>
#include <memory>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/process/limits.h"
#include "core/security/own_files.h"
#include "faces/cli/commands.h"
#include "faces/cli/json_line.h"
#include "faces/cli/printable.h"
#include "faces/cli/top/trace_choice.h"

namespace muster::cli {
namespace {

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
                        : printable(trace::summary(*job) + shown->note_lines()));
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

std::map<int, std::int64_t> nanoseconds_behind(const trace::JobTrace& job,
                                               const std::vector<trace::Holdup>& holdups) {
  std::map<int, std::int64_t> behind;
  const std::int64_t now = job.now_ns();
  for (const auto& holdup : holdups) {
    if (holdup.usual) continue;
    for (const int rank : holdup.behind)
      behind[rank] = std::max(behind[rank], std::max<std::int64_t>(now - holdup.since_ns, 1));
  }
  return behind;
}

}  // namespace muster::cli
