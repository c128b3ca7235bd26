// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/long_waits.h"

#include <pthread.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"

namespace muster::trace {
namespace {

constexpr Duration kLongWait = std::chrono::seconds(10);
constexpr Duration kStall = std::chrono::minutes(1);

Duration age_of(const Record& call, std::int64_t now_ns) {
  return std::chrono::nanoseconds(now_ns - call.start_ns);
}

}  // namespace

std::vector<const Record*> WaitReports::due(const RankTrace& mine, std::int64_t now_ns) {
  std::vector<const Record*> found;
  std::set<std::uint64_t> waiting;
  for (const auto& call : mine.records) {
    if (!call.under_way()) continue;
    waiting.insert(call.ticket);
    auto& next = next_.try_emplace(call.ticket, limit_).first->second;
    const auto age = age_of(call, now_ns);
    if (age < next) continue;
    while (next <= age) next *= 2;
    found.push_back(&call);
  }
  std::erase_if(next_, [&](const auto& each) { return !waiting.contains(each.first); });
  return found;
}

std::string describe_wait(const Record& call, const JobTrace& job, int rank, std::int64_t now_ns) {
  const auto* mine = job.rank(rank);
  const auto* group =
      mine != nullptr && call.group < mine->groups.size() ? &mine->groups[call.group] : nullptr;
  std::string text = call.name;
  if (call.sequence > 0) text += " #" + std::to_string(call.sequence);
  if (call.sequence == 0 && call.peer >= 0) text += " with rank " + std::to_string(call.peer);
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(age_of(call, now_ns));
  text += " on group " + (group != nullptr ? group->name : "?") + " has waited for " +
          muster::describe(waited);
  if (group == nullptr || call.sequence == 0) return text;
  const auto known = report_peers(job, group->name, call.sequence, group->members, rank, {}).text;
  return known.empty() ? text : text + "; " + known;
}

WaitLimits wait_limits(bool shows_info) {
  return shows_info ? WaitLimits{kLongWait, std::chrono::seconds(1)}
                    : WaitLimits{kStall, std::chrono::seconds(10)};
}

void log_waits(WaitReports& reports, const Recorder& recorder, const PeerTraces& peer_traces,
               int rank, std::int64_t now_ns) {
  const auto mine = read_trace(recorder.path());
  if (!mine) return;
  const auto due = reports.due(*mine, now_ns);
  const JobTrace job = due.empty() ? JobTrace() : peer_traces.look();
  for (const auto* call : due)
    log(age_of(*call, now_ns) < kStall ? LogLevel::info : LogLevel::warning,
        describe_wait(*call, job, rank, now_ns));
}

LongWaits::LongWaits(std::shared_ptr<const Recorder> recorder,
                     std::shared_ptr<const PeerTraces> peer_traces, int rank)
    : recorder_(std::move(recorder)), peer_traces_(std::move(peer_traces)), rank_(rank) {
  auto thread = start_thread("the thread that tells of long waits", [this] { watch(); });
  if (thread.ok()) {
    thread_ = std::move(*thread);
  } else {
    log(LogLevel::warning, thread.status().message());  // the job runs without
  }
}

LongWaits::~LongWaits() {
  if (!thread_.joinable()) return;
  if (mark_.forked()) {
    thread_.detach();  // it runs in the parent
    return;
  }
  {
    const std::lock_guard guard(lock_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LongWaits::watch() {
  pthread_setname_np(pthread_self(), "muster-waits");
  set_log_rank(rank_);
  const WaitLimits limits = wait_limits(logs(LogLevel::info));
  WaitReports reports(limits.reported);
  std::unique_lock guard(lock_);
  while (!changed_.wait_for(guard, limits.between_looks, [this] { return stop_; })) {
    guard.unlock();
    log_waits(reports, *recorder_, *peer_traces_, rank_, wall_now_ns());
    guard.lock();
  }
}

}  // namespace muster::trace
