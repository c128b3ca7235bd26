// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/top/trace_choice.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/environment.h"
#include "core/trace/run_directory.h"
#include "faces/cli/parse.h"
#include "jobs/launch/options.h"
#include "muster/clock.h"

namespace muster::cli {
namespace {

/// The store of a running job takes connections at once; this leaves room for a lost packet.
constexpr Duration kConnectLimit = std::chrono::seconds(4);

Result<launch::Endpoint> endpoint_of(const std::string& text) {
  auto endpoint = launch::parse_endpoint("--store", text);
  if (endpoint && !endpoint->port)
    return Status(Code::invalid_argument, "\"" + text + "\" has no port; write HOST:PORT");
  return endpoint;
}

}  // namespace

std::string ShownJob::note_lines() const {
  std::string text;
  for (const auto& note : notes) text += note + "\n";
  return text;
}

void TraceChoice::add_to(CLI::App& app, const std::string& folder) {
  auto* pid_option = app.add_option("--pid", pid_, "the job that has this process as a rank")
                         ->type_name("PID")
                         ->check(whole_above_zero());
  auto* directory_option =
      app.add_option(folder, directory_,
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

Status TraceChoice::find(std::size_t records, bool prefers_live) {
  ask_.records = records;
  ask_.patience = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait_));
  if (by_store()) return connect();
  const bool chosen = pid_ != 0 || !name_.empty() || !directory_.empty();
  const auto found = find_directory(prefers_live && !chosen);
  if (!found) return found.status();
  const bool one_job = pid_ != 0 || *found == directory_;
  base_ = one_job ? std::string() : directory_.empty() ? trace::run_directory() : directory_;
  directory_ = *found;
  if (!chosen) note_other_jobs();
  return {};
}

Result<ShownJob> TraceChoice::read() const {
  if (!by_store()) {
    auto job = trace::read_job(directory_);
    if (!job) return job.status();
    return ShownJob{std::move(*job), notes_};
  }
  auto asked = trace::ask_job(*store_, ask_);
  if (!asked) return asked.status();
  asked->job.directory = "the answers of the ranks to the store at " + store_text_;
  return ShownJob{std::move(asked->job), std::move(asked->notes)};
}

Result<ShownJob> TraceChoice::read_latest() {
  auto shown = read();
  if (by_store()) return shown;
  const auto lives = [](const auto& rank) { return trace::is_open(rank.life); };
  if (shown) run_id_ = shown->job.ranks.front().run_id;
  if (shown && std::any_of(shown->job.ranks.begin(), shown->job.ranks.end(), lives)) return shown;
  if (base_.empty() || run_id_.empty()) return shown;
  for (auto& job : trace::live_jobs_but(base_, directory_)) {
    if (job.ranks.front().run_id != run_id_) continue;
    directory_ = job.directory;
    return ShownJob{std::move(job), notes_};
  }
  return shown;
}

Result<std::string> TraceChoice::find_directory(bool prefers_live) const {
  const std::string base = trace::run_directory();
  if (pid_ != 0) return trace::find_job_of(base, pid_);
  if (!name_.empty()) return trace::find_job_called(base, name_);
  if (prefers_live) {
    if (const auto live = trace::live_jobs_but(base, ""); !live.empty())
      return live.front().directory;
  }
  return trace::find_job(directory_.empty() ? base : directory_);
}

void TraceChoice::note_other_jobs() {
  for (const auto& job : trace::live_jobs_but(trace::run_directory(), directory_)) {
    const auto& first = job.ranks.front();
    notes_.push_back("not shown: " + trace::title(job) +
                     ", which runs here too; choose it with --job " +
                     (first.run_id.empty() ? first.job : first.run_id));
  }
}

Status TraceChoice::connect() {
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

}  // namespace muster::cli
