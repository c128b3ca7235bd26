// SPDX-License-Identifier: BSD-3-Clause
/// Futures: returned by rpc_async, and by functions that free their thread before they reply (SPEC
/// "async_execution"); and the origin of the exceptions that they rethrow.
///
/// A `Future<T>` is a handle to shared state; copies see the same value. A thread that waits for a
/// future of an agent drives that agent's messages meanwhile. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/clock.h"
#include "muster/errors.h"

namespace muster::rpc {

class Agent;

/// The origin of an exception of the callee, which is rethrown in the caller. Not an exception by
/// itself. A standard exception, torch's c10::Error and muster's own errors are rethrown as the
/// same type or a derived one, with the text, the worker's name and, if known, the location. Any
/// other type becomes a DistBackendError with the type's name. All of them also derive from
/// RemoteError: `catch (const rpc::RemoteError& e) { e.worker(); e.type(); }`.
class RemoteError {
 public:
  RemoteError(std::string worker, int worker_id, std::string type, std::string text,
              std::string trace)
      : worker_(std::move(worker)),
        worker_id_(worker_id),
        type_(std::move(type)),
        text_(std::move(text)),
        trace_(std::move(trace)) {}
  virtual ~RemoteError() = default;
  const std::string& worker() const noexcept { return worker_; }
  int worker_id() const noexcept { return worker_id_; }
  /// "std::out_of_range".
  const std::string& type() const noexcept { return type_; }
  /// The original message, without the worker's name.
  const std::string& text() const noexcept { return text_; }
  /// The callee's stack frames if its type records them; otherwise empty.
  const std::string& trace() const noexcept { return trace_; }

 private:
  std::string worker_;
  int worker_id_;
  std::string type_, text_, trace_;
};

/// The type-independent part of a future's state. Always held by shared_ptr.
class FutureCore : public std::enable_shared_from_this<FutureCore> {
 public:
  explicit FutureCore(std::weak_ptr<Agent> agent) : agent_(std::move(agent)) {}
  virtual ~FutureCore() = default;
  FutureCore(const FutureCore&) = delete;
  FutureCore& operator=(const FutureCore&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  /// Returns false if the deadline passes first.
  bool wait_until(TimePoint deadline) const;
  std::exception_ptr error() const { return error_; }
  const std::weak_ptr<Agent>& agent() const { return agent_; }
  /// Only the first completion counts; returns false for later ones.
  bool fail(std::exception_ptr error);

 protected:
  /// Claims the right to complete. The caller then writes the value and calls `publish`.
  bool claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }
  void publish();
  /// As FutureState::then.
  void call_when_done(std::function<void()> callback);

 private:
  // The thread that sets `claimed_` writes the value or `error_`, then sets `done_` (release).
  // Others read them only after they have seen `done_` (acquire).
  std::weak_ptr<Agent> agent_;
  std::atomic<bool> claimed_{false};
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  // Guards `callbacks_`. `done_` is set under it, so a callback is either in the list by then or
  // called at once.
  mutable std::mutex mutex_;
  mutable std::condition_variable completed_;
  std::vector<std::function<void()>> callbacks_;
};

template <class T>
class FutureState final : public FutureCore {
 public:
  using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;
  using FutureCore::FutureCore;
  bool set(Stored value) {
    if (!claim()) return false;
    value_.emplace(std::move(value));
    publish();
    return true;
  }
  const Stored& value() const { return *value_; }
  /// Calls `callback(state)`: immediately if this is done; otherwise on completion, on a callback
  /// thread, or on the completing thread if there is no agent. `callback` must use its argument
  /// rather than capture this state, which would otherwise never be freed if it never completes.
  template <class F>
  void then(F callback) {
    call_when_done([this, callback = std::move(callback)]() mutable {
      callback(std::static_pointer_cast<FutureState>(this->shared_from_this()));
    });
  }

 private:
  std::optional<Stored> value_;
};

template <class T>
class Future {
 public:
  using State = FutureState<T>;
  Future() = default;
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state_->done(); }
  /// Blocks until done. Returns the value or throws the error, local or remote. May be called
  /// repeatedly.
  T wait() const {
    state_->wait_until(TimePoint::max());
    if (auto error = state_->error()) std::rethrow_exception(error);
    if constexpr (!std::is_void_v<T>) return state_->value();
  }
  /// Returns false if the deadline passes first.
  bool wait_until(TimePoint deadline) const { return state_->wait_until(deadline); }
  /// Null if not done or successful.
  std::exception_ptr error() const { return state_->done() ? state_->error() : nullptr; }

  /// Returns a future of `callback(future)`, which runs once this future is done, also if it failed
  /// (`wait` inside the callback then throws). Exceptions of the callback fail the new future.
  template <class F>
  auto then(F callback) const -> Future<std::invoke_result_t<F, Future<T>>> {
    using U = std::invoke_result_t<F, Future<T>>;
    auto next = std::make_shared<FutureState<U>>(state_->agent());
    state_->then(
        [next, callback = std::move(callback)](const std::shared_ptr<State>& state) mutable {
          const Future<T> self(state);
          try {
            if constexpr (std::is_void_v<U>) {
              callback(self);
              next->set({});
            } else {
              next->set(callback(self));
            }
          } catch (...) {
            next->fail(std::current_exception());
          }
        });
    return Future<U>(std::move(next));
  }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

/// The completing end of a future. Destroying the last copy without a value fails the future. A
/// second value throws std::logic_error.
template <class T>
class Promise {
 public:
  Promise();
  explicit Promise(std::weak_ptr<Agent> agent)
      : holder_(std::make_shared<Holder>(std::make_shared<FutureState<T>>(std::move(agent)))) {}

  Future<T> future() const { return Future<T>(holder_->state); }
  template <class... V>
  void set_value(V&&... value) const {
    if (!holder_->state->set(typename FutureState<T>::Stored{std::forward<V>(value)...})) twice();
  }
  void set_exception(std::exception_ptr error) const {
    if (!holder_->state->fail(std::move(error))) twice();
  }

 private:
  [[noreturn]] static void twice() { throw std::logic_error("a promise was given a second value"); }
  struct Holder {
    explicit Holder(std::shared_ptr<FutureState<T>> s) : state(std::move(s)) {}
    ~Holder() {
      if (!state->done())
        state->fail(
            std::make_exception_ptr(std::runtime_error("the promise was dropped without a value")));
    }
    std::shared_ptr<FutureState<T>> state;
  };
  std::shared_ptr<Holder> holder_;
};

/// The agent that promises made by the calling thread belong to; null before init_rpc.
std::weak_ptr<Agent> agent_of_thread();

template <class T>
Promise<T>::Promise() : Promise(agent_of_thread()) {}

/// A future that is already done.
template <class T>
Future<std::decay_t<T>> made_ready(T&& value) {
  auto state = std::make_shared<FutureState<std::decay_t<T>>>(std::weak_ptr<Agent>());
  state->set(std::forward<T>(value));
  return Future<std::decay_t<T>>(std::move(state));
}

/// Waits for all futures and returns their values in order. If some failed, throws the error of the
/// first by position.
template <class T>
std::vector<T> wait_all(const std::vector<Future<T>>& futures) {
  for (const auto& future : futures) future.wait_until(TimePoint::max());
  std::vector<T> values;
  values.reserve(futures.size());
  for (const auto& future : futures) values.push_back(future.wait());
  return values;
}

}  // namespace muster::rpc
