// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/work/recorded_work.h"

#include <ATen/core/ivalue.h>

namespace muster::group {

void RecordedWork::record(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (error == nullptr) return mark_.end();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& why) {
    mark_.fail(why.what());
  } catch (...) {
    mark_.fail("it threw what is no std::exception");
  }
}

bool RecordedWork::is_completed() {
  if (!work_->is_completed()) return false;
  record(work_->exception());
  return true;
}

bool RecordedWork::is_success() { return is_completed() && work_->is_success(); }

bool RecordedWork::wait(std::optional<Duration> timeout) {
  try {
    const bool done = work_->wait(timeout);
    record(nullptr);
    return done;
  } catch (const std::exception&) {
    if (work_->is_completed()) record(std::current_exception());
    throw;
  }
}

c10::intrusive_ptr<c10::ivalue::Future> RecordedWork::get_future() {
  auto future = work_->get_future();
  future->addCallback([weak = weak_from_this()](c10::ivalue::Future& done) {
    if (const auto self = weak.lock()) self->record(done.exception_ptr());
  });
  return future;
}

std::exception_ptr RecordedWork::exception() {
  auto error = work_->exception();
  if (error != nullptr) record(error);
  return error;
}

}  // namespace muster::group
