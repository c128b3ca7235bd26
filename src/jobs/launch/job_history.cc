// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/job_history.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/security/own_files.h"
#include "muster/clock.h"

namespace muster::launch {
namespace {

constexpr std::size_t kMostQueued = std::size_t{1} << 20;  // limit: memory for what was not written
// limit: of a launcher that ends, for the next bytes to be taken, and for all
constexpr Duration kPatienceWithReader = std::chrono::seconds(2);
constexpr Duration kPatienceAtEnd = std::chrono::seconds(10);
constexpr Duration kLongestWaitTold = std::chrono::hours(24 * 366);  // limit: the clock's numbers

/// "2026-11-27T08:00:00.123Z".
std::string time_text(Duration from_now = Duration(0)) {
  const auto now = std::chrono::system_clock::now() + from_now;
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[32];
  const std::size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  const auto part = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch());
  char rest[8];
  std::snprintf(rest, sizeof rest, ".%03dZ", static_cast<int>(part.count() % 1000));
  return std::string(text, length) + rest;
}

}  // namespace

std::string EventLog::Origin::line_of(const std::string& event,
                                      const std::vector<Field>& fields) const {
  nlohmann::ordered_json line = {
      {"time", time_text()}, {"event", event}, {"job", job}, {"host", host}};
  for (const auto& [name_of_field, value] : fields)
    std::visit([&, key = name_of_field](const auto& each) { line[key] = each; }, value);
  // Bytes that are not valid UTF-8 (in a host name or a worker's message) are replaced.
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

EventLog::EventLog(Origin origin, Descriptor file)
    : origin_(std::move(origin)),
      writer_(std::make_unique<QueuedWriter>(
          QueueOptions{.thread = "the thread that writes events",
                       .own = std::move(file),
                       .keeps_refused = true,
                       .most = kMostQueued,
                       .dropped_note =
                           [origin = origin_](std::size_t count) {
                             return origin.line_of("events_dropped",
                                                   {{"count", static_cast<std::int64_t>(count)}});
                           },
                       .on_error =
                           [name = origin_.name](int error) {
                             log(LogLevel::warning, "events of the job cannot be written to " +
                                                        name + ": " + errno_text(error) +
                                                        "; they are put again with the next one");
                           }})) {}

Result<EventLog> EventLog::open(const std::string& path, std::string job, std::string host) {
  auto file = open_own_file(path, O_WRONLY | O_CREAT | O_APPEND, {.name = "the file of events"});
  if (!file) return file.status().with_context("--events");
  return to(std::move(*file), path, std::move(job), std::move(host));
}

EventLog EventLog::to(Descriptor descriptor, std::string name, std::string job, std::string host) {
  return {Origin{std::move(name), std::move(job), std::move(host)}, std::move(descriptor)};
}

EventLog::~EventLog() {
  if (!writer_) return;
  const std::size_t lost = writer_->finish(kPatienceWithReader, kPatienceAtEnd);
  if (lost > 0)
    log(LogLevel::warning, std::to_string(lost) + (lost == 1 ? " event" : " events") +
                               " of the job were not written to " + origin_.name +
                               ", which takes no more");
}

void EventLog::write(const std::string& event, const std::vector<Field>& fields) {
  writer_->put(origin_.line_of(event, fields));
}

Status JobHistory::open(const RunOptions& options, const std::string& job,
                        const std::string& host) {
  if (options.numbers) numbers_ = options.numbers;
  numbers_->begin_job(job, host);
  if (options.events) {
    auto file = EventLog::open(*options.events, job, host);
    if (!file) return file.status();
    logs_.push_back(std::move(*file));
  }
  if (!options.events_on_console) return {};
  Descriptor copy(::fcntl(2, F_DUPFD_CLOEXEC, 3));
  if (!copy) return Status(Code::exhausted, "no descriptor for events: " + errno_text(errno));
  logs_.push_back(EventLog::to(std::move(copy), "standard error", job, host));
  return {};
}

void JobHistory::write(const std::string& event, const std::vector<EventLog::Field>& fields) {
  for (EventLog& each : logs_) each.write(event, fields);
}

std::string JobHistory::error_file(int local_rank, int attempt) const {
  if (errors_.path().empty()) return {};
  return errors_.path() + "/" + std::to_string(attempt) + "_" + std::to_string(local_rank) +
         ".json";
}

FailureNote JobHistory::note(const OwnFailure& failure) {
  const auto error = read_error_file(error_file(failure.ranks.local_rank, failure.attempt));
  std::string text = failure.text;
  if (error) text += ": " + error->message;
  if (!failure.log.empty()) text += "; its log: " + failure.log;
  failures_.push_back(text);
  numbers_->add_failure();
  write("worker_failed",
        {{"epoch", failure.epoch},
         {"attempt", std::int64_t{failure.attempt}},
         {"node", std::int64_t{failure.slot}},
         {"rank", std::int64_t{failure.ranks.rank}},
         {"local_rank", std::int64_t{failure.ranks.local_rank}},
         {"pid", std::int64_t{failure.pid}},
         {"exit_code", std::int64_t{failure.exit.shell_code()}},
         {"signal", failure.exit.signal != 0 ? signal_name(failure.exit.signal) : std::string()},
         {"error", error ? error->message : std::string()},
         {"log", failure.log}});
  return {failure.epoch, ++own_, text};
}

void JobHistory::note(const std::vector<FailureNote>& failures) {
  for (const FailureNote& failure : failures) {
    failures_.push_back(failure.text);
    write("failed_elsewhere", {{"epoch", failure.epoch}, {"what", failure.text}});
  }
}

void JobHistory::begin(const EpochPlan& plan, int restarts, int world_size) {
  numbers_->begin_epoch(plan.epoch.number, restarts, world_size);
  write("workers_started", {{"epoch", plan.epoch.number},
                            {"restarts", std::int64_t{restarts}},
                            {"node", std::int64_t{plan.slot}},
                            {"nodes", static_cast<std::int64_t>(plan.nodes.size())},
                            {"world_size", std::int64_t{world_size}},
                            {"reason", plan.epoch.reason}});
}

void JobHistory::lose(std::int64_t epoch, std::int64_t commits, const std::string& text) {
  failures_.push_back(text);
  losses_.push_back(text);
  write("state_lost", {{"epoch", epoch}, {"commits", commits}, {"what", text}});
}

void JobHistory::wait(const StateWait& wait) {
  std::string nodes;
  for (const int slot : wait.slots) {
    if (slot < 0) continue;  // it has no number, and the text names its host
    nodes += (nodes.empty() ? "" : ", ") + std::to_string(slot);
  }
  write("waits_for_state", {{"epoch", wait.epoch},
                            {"nodes", nodes},
                            {"until", time_text(std::min(wait.at_most, kLongestWaitTold))},
                            {"what", wait.text}});
}

void JobHistory::trouble(const GroupTrouble& trouble, int rank) {
  std::string blamed;
  for (const int each : trouble.blamed)
    blamed += (blamed.empty() ? "" : ", ") + std::to_string(each);
  write("group_failed", {{"epoch", trouble.epoch},
                         {"rank", std::int64_t{rank}},
                         {"blamed", blamed},
                         {"what", trouble.text}});
}

void JobHistory::end(int exit_code, const std::string& reason) {
  write("ended", {{"exit_code", std::int64_t{exit_code}}, {"reason", reason}});
}

}  // namespace muster::launch
