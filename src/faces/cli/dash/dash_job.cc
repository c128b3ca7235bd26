// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/dash_job.h"

#include <algorithm>
#include <utility>

namespace muster::cli {
namespace {

constexpr int kIdleShare = 3;  // of the time that a look takes, at least before the next

}  // namespace

std::shared_ptr<const DashLook> DashJob::kept() {
  const std::lock_guard lock(lock_);
  return last_;
}

Result<std::shared_ptr<const DashLook>> DashJob::latest() {
  auto before = kept();
  std::unique_lock looking(looking_, std::defer_lock);
  if (before == nullptr)
    looking.lock();
  else if (!looking.try_lock())
    return before;
  before = kept();
  if (before != nullptr && steady_clock().now() < next_) return before;
  const TimePoint begun = steady_clock().now();
  auto now = look_again();
  const Duration took = steady_clock().now() - begun;
  next_ = deadline_after(steady_clock(), std::max(between_looks_, kIdleShare * took));
  if (now == nullptr) return problem_;
  if (ended_ && now->over && before != nullptr && !before->over) ended_();
  const std::lock_guard lock(lock_);
  last_ = now;
  return now;
}

/// Called with `looking_`. Null and `problem_` if the job cannot be seen and never was.
std::shared_ptr<const DashLook> DashJob::look_again() {
  auto shown = look_();
  auto look = std::make_shared<DashLook>();
  if (shown) {
    replaced_.look(shown->job);
    look->over = trace::all_are_gone(shown->job);
    look->shown = std::move(*shown);
    look->replaced = replaced_.events();
    return look;
  }
  problem_ = shown.status();
  const auto before = kept();
  if (before == nullptr) return nullptr;
  if (before->over) return before;
  *look = *before;
  if (std::exchange(look->lost, true)) look->shown.notes.pop_back();
  // A store, or a file system, that does not answer says nothing of the ranks.
  look->over = problem_.code() == Code::invalid_argument;
  look->shown.notes.push_back(
      (look->over ? "the job cannot be seen any more, and this is what was seen last; ranks of a "
                    "job that ends well remove their traces ("
                  : "the job does not answer now, and this is what was seen last (") +
      problem_.message() + ")");
  return look;
}

}  // namespace muster::cli
