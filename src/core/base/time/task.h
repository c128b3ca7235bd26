// SPDX-License-Identifier: BSD-3-Clause
/// Resumable work: coroutines that the waiting thread advances.
///
/// A `Task` is lazily started and single-owner. Inside one, `co_await until(predicate)` gives the
/// thread back until the predicate holds, and `co_await child_task()` runs another task to its end.
/// Nothing inside blocks and there are no callbacks: the owner calls `step()`, which evaluates only
/// the innermost predicate and resumes there. A task may be stepped by different threads, one at a
/// time (the owner holds a lock). Frames come from a small per-thread pool, so a steady state
/// allocates nothing.
///
/// Destroying an unfinished task destroys its whole chain of frames; references that its predicates
/// hold must outlive it.
///
/// A task throws nothing: an exception that leaves its body, or that the predicate it waits for
/// throws, is its result, as `status_of_exception` tells it. So its value is a Status, or can be
/// made of one, such as a Result. The end of the thread that steps it (pthread_cancel) passes
/// through: then the task is done, with Code::aborted.
#pragma once

#include <cxxabi.h>

#include <coroutine>
#include <cstddef>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/base/exception_status.h"
#include "muster/status.h"

namespace muster {

namespace task_detail {

void* allocate_frame(std::size_t bytes);
Status thread_ended();
void free_frame(void* frame, std::size_t bytes) noexcept;

/// Belongs to the root of a chain: the frame to resume and the predicate that it waits for.
struct TaskContext {
  std::coroutine_handle<> leaf;
  bool (*ready)(void*) = nullptr;
  void* argument = nullptr;
  std::size_t turns = 0;

  static void* operator new(std::size_t bytes) { return allocate_frame(bytes); }
  static void operator delete(void* context, std::size_t bytes) noexcept {
    free_frame(context, bytes);
  }
};

struct PromiseBase {
  TaskContext* context = nullptr;
  std::coroutine_handle<> parent;

  static void* operator new(std::size_t bytes) { return allocate_frame(bytes); }
  static void operator delete(void* frame, std::size_t bytes) noexcept { free_frame(frame, bytes); }

  std::suspend_always initial_suspend() noexcept { return {}; }
  struct Final {
    bool await_ready() noexcept { return false; }
    template <class Promise>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> self) noexcept {
      PromiseBase& promise = self.promise();
      if (!promise.parent) return std::noop_coroutine();
      promise.context->leaf = promise.parent;
      return promise.parent;
    }
    void await_resume() noexcept {}
  };
  Final final_suspend() noexcept { return {}; }
};

}  // namespace task_detail

template <class T = Status>
class [[nodiscard]] Task {
  static_assert(std::is_convertible_v<Status, T>, "a task that throws has a Status");

 public:
  struct promise_type : task_detail::PromiseBase {
    std::optional<T> value;
    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    void return_value(T result) { value.emplace(std::move(result)); }
    void unhandled_exception() { value.emplace(status_of_exception()); }
  };

  Task() = default;
  Task(Task&& other) noexcept
      : frame_(std::exchange(other.frame_, {})), context_(std::exchange(other.context_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      destroy();
      frame_ = std::exchange(other.frame_, {});
      context_ = std::exchange(other.context_, nullptr);
    }
    return *this;
  }
  ~Task() { destroy(); }

  bool valid() const { return static_cast<bool>(frame_); }
  bool done() const { return frame_.promise().value.has_value(); }
  /// Goes on as far as it can without waiting; true once the task has its result.
  bool step() {
    if (done()) return true;
    if (context_ == nullptr) {
      context_ = new task_detail::TaskContext;
      frame_.promise().context = context_;
      context_->leaf = frame_;
    } else if (context_->ready != nullptr && !context_->ready(context_->argument)) {
      return false;
    }
    context_->ready = nullptr;
    ++context_->turns;
    try {
      context_->leaf.resume();
    } catch (...) {  // the thread is being terminated: the coroutine cannot be resumed
      frame_.promise().value.emplace(task_detail::thread_ended());
      throw;
    }
    return done();
  }
  /// How often it has gone on: the same after a `step()` that found nothing to do.
  std::size_t turns() const { return context_ == nullptr ? 0 : context_->turns; }
  /// Once, after `step()` returned true.
  T result() { return std::move(*frame_.promise().value); }
  /// The same, as often as one likes, left where it is.
  const T& peek() const { return *frame_.promise().value; }

  // Awaiting a child from within a task.
  bool await_ready() const noexcept { return false; }
  template <class Promise>
  std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> parent) noexcept {
    auto& promise = frame_.promise();
    promise.context = parent.promise().context;
    promise.parent = parent;
    promise.context->leaf = frame_;
    return frame_;
  }
  T await_resume() { return std::move(*frame_.promise().value); }

 private:
  explicit Task(std::coroutine_handle<promise_type> frame) : frame_(frame) {}
  void destroy() {
    if (frame_) frame_.destroy();
    delete context_;
    frame_ = {};
    context_ = nullptr;
  }
  std::coroutine_handle<promise_type> frame_;
  task_detail::TaskContext* context_ = nullptr;  // set at the root only, by the first step
};

/// `co_await until([&] { return condition; })`. The predicate is asked at least once, must not
/// block, and is asked by whichever thread steps the task.
template <class Predicate>
class until {
 public:
  explicit until(Predicate predicate) : predicate_(std::move(predicate)) {}
  bool await_ready() { return predicate_(); }
  template <class Promise>
  void await_suspend(std::coroutine_handle<Promise> self) {
    auto* context = self.promise().context;
    context->leaf = self;
    context->ready = [](void* me) { return static_cast<until*>(me)->holds(); };
    context->argument = this;
  }
  void await_resume() const {
    if (thrown_) [[unlikely]]
      std::rethrow_exception(thrown_);
  }

 private:
  // An exception of the predicate is thrown in the task, not in the caller of `step`.
  bool holds() {
    try {
      return predicate_();
    } catch (const abi::__forced_unwind&) {
      throw;
    } catch (...) {
      thrown_ = std::current_exception();
      return true;
    }
  }

  Predicate predicate_;
  std::exception_ptr thrown_;
};

}  // namespace muster
