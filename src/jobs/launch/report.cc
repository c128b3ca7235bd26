// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/report.h"

#include <algorithm>
#include <ctime>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "core/trace/reader.h"
#include "core/trace/run_directory.h"

namespace muster::launch {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // limit: memory

std::string text_of(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

}  // namespace

std::optional<WorkerError> parse_error_file(std::string_view text) {
  const auto file = nlohmann::json::parse(text, nullptr, false);
  if (!file.is_object()) return std::nullopt;
  const auto message = file.find("message");
  if (message == file.end()) return std::nullopt;
  if (message->is_string()) return WorkerError{message->get<std::string>(), {}};
  if (!message->is_object()) return std::nullopt;
  WorkerError error{text_of(*message, "message"), {}};
  if (error.message.empty()) return std::nullopt;
  const auto extra = message->find("extraInfo");
  if (extra != message->end() && extra->is_object()) error.stack = text_of(*extra, "py_callstack");
  return error;
}

std::optional<WorkerError> read_error_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text(kMostBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_error_file(text);
}

namespace {

std::string clock_text(std::chrono::system_clock::time_point at) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(at);
  std::tm local{};
  ::localtime_r(&seconds, &local);
  char text[64];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &local);
  return text;
}

// {0, 2, 3} -> "0, 2, 3".
std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string indent(const std::string& text) {
  std::string result;
  std::size_t from = 0;
  while (from <= text.size()) {
    const std::size_t end = std::min(text.find('\n', from), text.size());
    result += "  | " + text.substr(from, end - from) + "\n";
    from = end + 1;
  }
  return result;
}

const WorkerRanks& ranks_of(const ReportFacts& facts, const WorkerEnd& end) {
  return facts.ranks[static_cast<std::size_t>(end.local_rank)];
}

// The other workers, grouped by how they ended.
std::string others(const LauncherState& state, const ReportFacts& facts) {
  std::map<std::string, std::vector<int>> groups;
  for (std::size_t i = 0; i < state.ends.size(); ++i) {
    if (i == state.first_failure) continue;
    const WorkerEnd& end = state.ends[i];
    groups[end.by_us ? "ended by the launcher with " + signal_name(end.exit.signal)
                     : describe(end.exit)]
        .push_back(ranks_of(facts, end).rank);
  }
  std::string text;
  for (auto& [how, ranks] : groups) {
    std::sort(ranks.begin(), ranks.end());
    text += std::string(text.empty() ? "" : "; ") + (ranks.size() == 1 ? "rank " : "ranks ") +
            list(ranks) + ": " + how;
  }
  return text;
}

/// The ranks were told to end, as for a node that leaves, and did: none hung in a call.
bool has_stopped_well(const LauncherState& state) {
  return state.cause == LauncherCause::stopped_by_signal && !state.ends.empty() &&
         std::ranges::all_of(state.ends, [](const WorkerEnd& end) { return end.exit.success(); });
}

}  // namespace

std::string find_traces(const std::vector<WorkerRecord>& workers, const std::string& run_id) {
  const std::string base = trace::run_directory();
  std::int64_t since = std::numeric_limits<std::int64_t>::max();
  for (const WorkerRecord& worker : workers)
    since = std::min<std::int64_t>(since,
                                   worker.started.time_since_epoch() / std::chrono::nanoseconds(1));
  for (const WorkerRecord& worker : workers) {
    if (const auto found = trace::find_job_of(base, worker.pid, since)) return *found;
  }
  if (run_id == "none") return {};  // many jobs have no name
  const auto named = trace::find_job_called(base, run_id, since);
  return named ? *named : std::string();
}

std::string describe_end(const WorkerEnd& end, const ReportFacts& facts) {
  const WorkerRecord& worker = facts.workers[static_cast<std::size_t>(end.local_rank)];
  std::string text = "rank " + std::to_string(ranks_of(facts, end).rank) + " (local rank " +
                     std::to_string(end.local_rank);
  if (worker.pid > 0) text += ", process " + std::to_string(worker.pid);
  text += ", host " + facts.host + ")";
  if (!worker.start_error.empty()) return text + " could not be started: " + worker.start_error;
  text += (end.exit.signal != 0 ? " was ended by " : " ended with ") + describe(end.exit);
  return worker.memory_kill.empty() ? text : text + "; " + worker.memory_kill;
}

std::string first_failure_line(const LauncherState& state, const ReportFacts& facts) {
  return state.first_failure ? describe_end(state.ends[*state.first_failure], facts)
                             : std::string();
}

std::string failure_report(const LauncherState& state, const ReportFacts& facts) {
  const std::string who = facts.command + ": ";
  std::string text;
  if (state.first_failure) {
    const WorkerEnd& end = state.ends[*state.first_failure];
    const WorkerRecord& worker = facts.workers[static_cast<std::size_t>(end.local_rank)];
    text = who + "FAILED: " + first_failure_line(state, facts);
    if (worker.start_error.empty()) {
      text += " at " + clock_text(worker.ended);
      // The host's clock may have been set back meanwhile.
      if (worker.ended >= worker.started)
        text +=
            ", after " +
            muster::describe(std::chrono::duration_cast<Duration>(worker.ended - worker.started));
    }
    text += "\n";
    if (!facts.error.message.empty()) {
      text += who + "its error file says: " + facts.error.message + "\n";
      if (!facts.error.stack.empty()) text += indent(facts.error.stack);
    }
    if (!facts.tail.empty()) text += who + "the last of its standard error:\n" + indent(facts.tail);
    if (!facts.advice.empty()) text += who + facts.advice + "\n";
  }
  if (state.cause == LauncherCause::stopped_by_signal)
    text += who + "stopped by " + signal_name(state.stop_signal) + "\n";
  if (state.cause == LauncherCause::other_node_failed)
    text += who +
            (state.other_node.starts_with("node ") ? "FAILED on another node: " : "FAILED: ") +
            state.other_node + "\n";
  if (text.empty()) return text;
  if (const std::string rest = others(state, facts); !rest.empty())
    text += who + "the other workers of this node: " + rest + "\n";
  if (facts.failures.size() > 1) {
    text += who + "all failures, in order:\n";
    for (std::size_t i = 0; i < facts.failures.size(); ++i)
      text += "  " + std::to_string(i + 1) + ". " + facts.failures[i] + "\n";
  }
  if (!facts.traces.empty() && !has_stopped_well(state))
    text += who + "what the ranks called last: muster trace --dir " + facts.traces + "\n";
  if (!facts.log_folder.empty()) text += who + "logs are in " + facts.log_folder + "\n";
  return text + who + "exit code " + std::to_string(state.exit_code) + "\n";
}

}  // namespace muster::launch
