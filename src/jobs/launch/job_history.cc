#include "jobs/launch/job_history.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "core/net/socket_address.h"

namespace muster::launch {

Status JobHistory::open(const RunOptions& options, const std::string& job,
                        const std::string& host) {
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
  write("workers_started", {{"epoch", plan.epoch.number},
                            {"restarts", std::int64_t{restarts}},
                            {"node", std::int64_t{plan.slot}},
                            {"nodes", static_cast<std::int64_t>(plan.nodes.size())},
                            {"world_size", std::int64_t{world_size}},
                            {"reason", plan.epoch.reason}});
}

void JobHistory::end(int exit_code, const std::string& reason) {
  write("ended", {{"exit_code", std::int64_t{exit_code}}, {"reason", reason}});
}

}  // namespace muster::launch
