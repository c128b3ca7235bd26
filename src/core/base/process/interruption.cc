// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/interruption.h"

#include <utility>

namespace muster {
namespace {

constexpr Duration kLookEvery =
    std::chrono::milliseconds(200);  // limit: the patience of who presses Ctrl-C
thread_local const Interruption::InterruptionBinding* innermost = nullptr;

}  // namespace

void Interruption::raise(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (raised_.ok()) raised_ = Status(Code::aborted, "the wait was given up: " + why);
}

Status Interruption::status() const {
  const std::lock_guard lock(mutex_);
  return raised_;
}

Interruption::InterruptionBinding::InterruptionBinding(std::shared_ptr<Interruption> interruption)
    : interruption_(std::move(interruption)), outer_(std::exchange(innermost, this)) {}
Interruption::InterruptionBinding::~InterruptionBinding() { innermost = outer_; }

Status Interruption::of_thread() {
  for (const auto* each = innermost; each != nullptr; each = each->outer_) {
    if (Status raised = each->interruption_->status(); !raised) return raised;
  }
  return {};
}

Duration Interruption::look_every() { return innermost != nullptr ? kLookEvery : Duration::max(); }

}  // namespace muster
