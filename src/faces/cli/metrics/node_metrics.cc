// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/node_metrics.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <utility>

#include "core/trace/run_directory.h"

namespace muster::cli {
namespace {

/// Resident bytes; none where the process has ended.
std::optional<std::uint64_t> memory_of(std::int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  std::uint64_t size = 0, resident = 0;
  if (!(file >> size >> resident) || size == 0) return std::nullopt;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// By which a file server's clock, or the kernel's coarse one, may be behind.
constexpr std::int64_t kSlowestClock = 5'000'000'000;

bool any_lives(const trace::JobTrace& job) {
  return std::any_of(job.ranks.begin(), job.ranks.end(),
                     [](const auto& trace) { return trace::is_open(trace.life); });
}

/// Several launchers of a job may share a host, and so the job's folder of traces. Ranks that are
/// children of the workers have other numbers, and only one launcher.
void keep_own_ranks(trace::JobTrace& job, const launch::NodeNumbers::Values& numbers) {
  std::set<std::int64_t> pids;
  std::set<int> ranks;
  for (const auto& [local_rank, worker] : numbers.workers) {
    pids.insert(worker.pid);
    ranks.insert(worker.rank);
  }
  const auto is_worker = [&](const trace::RankTrace& rank) {
    return pids.contains(rank.pid) && trace::is_written_by(rank, rank.pid);
  };
  if (std::any_of(job.ranks.begin(), job.ranks.end(), is_worker))
    std::erase_if(job.ranks, [&](const auto& rank) { return !ranks.contains(rank.rank); });
}

}  // namespace

NodeMetrics::NodeMetrics(std::shared_ptr<const launch::NodeNumbers> numbers)
    : numbers_(std::move(numbers)),
      run_directory_(trace::run_directory()),
      since_ns_(trace::wall_now_ns()) {}

/// The ranks are the workers or children of them; children are found by the job's name. Folders
/// that have not changed since they were judged are not read again: a job may keep no traces, and
/// its neighbours large ones.
void NodeMetrics::find_traces(const launch::NodeNumbers::Values& numbers) {
  std::set<std::int64_t> pids;
  for (const auto& [local_rank, worker] : numbers.workers) pids.insert(worker.pid);
  const std::int64_t now = trace::wall_now_ns();
  const bool judged = pids == judged_pids_ && judged_ns_ <= now;  // the clock may be set back
  const std::int64_t since = judged ? std::max(since_ns_, judged_ns_ - kSlowestClock) : since_ns_;
  judged_pids_ = std::move(pids);
  judged_ns_ = now;
  for (const auto& [local_rank, worker] : numbers.workers) {
    if (auto found = trace::find_job_of(run_directory_, worker.pid, since)) {
      directory_ = std::move(*found);
      return;
    }
  }
  if (numbers.job.empty() || numbers.job == "none") return;
  if (auto found = trace::find_job_called(run_directory_, numbers.job, since))
    directory_ = std::move(*found);
}

void NodeMetrics::look() {
  const TimePoint begun = steady_clock().now();
  const auto numbers = numbers_->values();
  // The last calls of ranks that have been started again since, in another folder.
  if (epoch_ != numbers.epoch && !directory_.empty()) read_traces(seen_);
  if (!job_ || !any_lives(*job_) || epoch_ != numbers.epoch) {
    find_traces(numbers);
    epoch_ = numbers.epoch;
  }
  read_traces(numbers);
  seen_ = numbers;
  looking_ += steady_clock().now() - begun;
}

void NodeMetrics::read_traces(const launch::NodeNumbers::Values& numbers) {
  job_.reset();
  if (directory_.empty()) return;
  if (auto job = trace::read_job(directory_)) job_ = std::move(*job);
  if (job_) keep_own_ranks(*job_, numbers);
  if (job_) totals_.add(*job_);
}

std::string NodeMetrics::page() {
  if (!allowance_.has_any(steady_clock().now())) return page_;
  const TimePoint begun = steady_clock().now();
  page_ = new_page();
  allowance_.spend(steady_clock().now() - begun);
  return page_;
}

std::string NodeMetrics::new_page() {
  look();
  NodeSample sample;
  sample.numbers = numbers_->values();
  sample.job = job_ ? &*job_ : nullptr;
  sample.totals = &totals_;
  for (const auto& [local_rank, worker] : sample.numbers.workers) {
    if (worker.ended) continue;  // its number may be another process's by now
    if (const auto bytes = memory_of(worker.pid)) sample.memory[worker.rank] = *bytes;
  }
  if (const auto store = numbers_->store()) {
    // A store that does not answer now shows its last count.
    if (const auto count = store->count_refusals())
      refused_ = static_cast<std::uint64_t>(std::max<std::int64_t>(*count, 0));
    sample.refused = refused_;
  }
  sample.collection_seconds = std::chrono::duration<double>(looking_).count();
  return metrics_text(sample);
}

}  // namespace muster::cli
