#include "muster/group/backends/native_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <utility>

#include "muster/group/errors.h"

namespace muster::group {

NativeWork::NativeWork(std::string_view name, Staging staging, std::shared_ptr<collective::Communicator> communicator,
                       std::shared_ptr<const std::vector<int>> ranks, std::shared_ptr<std::atomic<bool>> shown, trace::Mark mark)
    : name_(name),
      communicator_(std::move(communicator)),
      ranks_(std::move(ranks)),
      shown_(std::move(shown)),
      staging_(std::move(staging)),
      mark_(std::move(mark)) {}

void NativeWork::track(collective::PendingRef pending) {
  pending_ = std::move(pending);
  // Holds the tensors until the engine is done with them, also when the user drops the Work.
  pending_->when_done([self = shared_from_this()](const Status& status) { self->complete(status); });
}

void NativeWork::complete(const Status& status) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::shared_ptr<collective::Communicator> let_go;  // a Work that is kept keeps no connections and no threads
  {
    const std::lock_guard lock(mutex_);
    if (completed_.load(std::memory_order_relaxed)) return;
    let_go = std::move(communicator_);
    try {
      check(status.ok() ? status : status.with_context(name_));
      staging_.finish();
      mark_.end();
    } catch (const std::exception& error) {
      mark_.fail(error.what());
      error_ = std::current_exception();
    }
    completed_.store(true, std::memory_order_release);
    future = future_;
  }
  if (future) end(*future);
}

/// A future of tensors on an accelerator remembers what its device is still to do on the current stream.
void NativeWork::end(c10::ivalue::Future& future) {
  if (error_) {
    show_error();
    future.setErrorIfNeeded(error_);
    return;
  }
  std::optional<c10::StreamGuard> stream;
  if (staging_.device() != nullptr) stream.emplace(staging_.device()->stream());
  future.markCompleted(c10::IValue(staging_.outputs()));
}

bool NativeWork::is_completed() {
  if (completed_.load(std::memory_order_acquire)) return true;
  // The callback may be just about to run on another thread; whoever sees the end first does what is left.
  if (!pending_->done()) return false;
  complete(pending_->wait(TimePoint::max()));
  return true;
}

bool NativeWork::is_success() {
  if (!is_completed()) return false;
  if (error_) show_error();
  return !error_;
}

bool NativeWork::wait(std::optional<Duration> timeout) {
  if (!completed_.load(std::memory_order_acquire)) {
    const auto deadline = timeout ? deadline_after(steady_clock(), *timeout) : TimePoint::max();
    const auto status = pending_->wait(deadline);
    if (status.code() == Code::timed_out && !pending_->done()) {
      raise(Status(Code::timed_out,
                   std::string(name_) + " was not done within the " + describe(*timeout) + " that wait() was given; it goes on",
                   status.ranks()));
    }
    complete(status);
  }
  if (!error_) {
    if (staging_.device() != nullptr) staging_.device()->join();
    return true;
  }
  show_error();
  std::rethrow_exception(error_);
}

c10::intrusive_ptr<c10::ivalue::Future> NativeWork::get_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      const auto* device = staging_.device();
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         device != nullptr ? device->asynchronous() : std::vector<c10::Device>{});
      if (!completed_.load(std::memory_order_relaxed)) return future_;
      future = future_;
    } else {
      return future_;
    }
  }
  end(*future);  // it was completed before anybody asked for the future
  return future;
}

int NativeWork::source_rank() {
  if (staging_.args().op != Op::recv || !is_success()) return -1;
  return (*ranks_)[static_cast<std::size_t>(pending_->source())];
}

std::exception_ptr NativeWork::exception() {
  if (!is_completed()) return nullptr;
  if (error_) show_error();
  return error_;
}

}  // namespace muster::group
