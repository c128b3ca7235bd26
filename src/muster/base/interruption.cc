#include "muster/base/interruption.h"

#include <utility>

namespace muster {
namespace {

constexpr Duration kLookEvery =
    std::chrono::milliseconds(200);  // limit: the patience of who presses Ctrl-C
thread_local std::shared_ptr<Interruption> bound;

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
    : before_(std::exchange(bound, std::move(interruption))) {}
Interruption::InterruptionBinding::~InterruptionBinding() { bound = std::move(before_); }

Status Interruption::of_thread() { return bound ? bound->status() : Status(); }

Duration Interruption::look_every() { return bound ? kLookEvery : Duration::max(); }

}  // namespace muster
