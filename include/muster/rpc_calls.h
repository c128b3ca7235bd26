// SPDX-License-Identifier: BSD-3-Clause
/// Remote procedure calls between workers: torch.distributed.rpc's names in namespace
/// `muster::rpc`.
///
///     rpc::register_function("scale", [](at::Tensor t, double by) { return t * by; });
///     rpc::init_rpc("worker0", {.rank = 0, .world_size = 2});
///     auto doubled = rpc::rpc_sync<at::Tensor>("worker1", "scale", torch::ones({2}), 2);
///     auto later = rpc::rpc_async<at::Tensor>("worker1", "aten::add", torch::ones({2}), 3);
///     rpc::shutdown();
///
/// `rpc_value.h` specifies which types can be sent, `rpc_function.h` which functions can be called.
/// Errors are DistError and its subclasses (`errors.h`); `rpc_future.h` specifies how the callee's
/// exceptions appear here. Everything except init_rpc and shutdown is thread-safe. A worker is a
/// process, or a thread with its own scope (`RpcScope`).
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/key_value_store.h"
#include "muster/rpc_function.h"
#include "muster/rpc_future.h"
#include "muster/rpc_options.h"
#include "muster/rpc_value.h"

namespace muster::rpc {

class Agent;  // one worker's calls and messages

/// Options of one call.
struct CallOptions {
  std::optional<Duration> timeout = {};  ///< zero: no limit; default: the worker's
};

/// Holds a worker's agent. One scope belongs to the process; if workers are threads of one process,
/// each binds its own. An agent's worker threads use its worker's scope.
class RpcScope {
 public:
  /// The calling thread's scope if one is bound, otherwise the process's.
  static const std::shared_ptr<RpcScope>& current();
  class Binding {
   public:
    explicit Binding(std::shared_ptr<RpcScope> scope);
    ~Binding();
    Binding(const Binding&) = delete;
    Binding& operator=(const Binding&) = delete;

   private:
    std::shared_ptr<RpcScope> before_;
  };

  RpcScope();
  ~RpcScope();
  RpcScope(const RpcScope&) = delete;
  RpcScope& operator=(const RpcScope&) = delete;
  /// Null before init_rpc.
  std::shared_ptr<Agent> agent() const;
  void set(std::shared_ptr<Agent> agent);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The calling worker's agent. Before init_rpc, throws DistError naming `caller`.
std::shared_ptr<Agent> current_agent(std::string_view caller);

/// The name of a kind of agent. `TENSORPIPE` is torch's default and here an alias of the native
/// one.
class BackendType {
 public:
  /// Throws DistError if the name is not registered.
  explicit BackendType(std::string_view name);
  static const BackendType NATIVE;
  static const BackendType TENSORPIPE;
  const std::string& name() const { return name_; }  ///< in upper case
  friend bool operator==(const BackendType&, const BackendType&) = default;

 private:
  std::string name_;
};

struct InitRpcOptions {
  std::optional<BackendType> backend = {};  ///< default: native
  int rank = -1;                            ///< -1: from the init method or the environment
  int world_size = -1;
  RpcBackendOptions rpc_backend_options = {};
  /// Replaces the init method; requires rank and world size.
  std::shared_ptr<store::Store> store = nullptr;
  /// Time limit for all workers to join; the error names the missing ones.
  Duration join_timeout = std::chrono::minutes(30);
};
/// Joins the job's workers as `name` and blocks until all have joined. Names must be unique, use
/// only letters, digits, '_', '-' and ':', and have at most 128 characters. On a duplicate, every
/// worker throws DistError naming the workers that share it. A second call without shutdown throws.
/// Starts RPC only, no process group.
void init_rpc(const std::string& name, const InitRpcOptions& options = {});
/// Whether init_rpc has been called on this worker, and shutdown has not.
bool is_initialized();
/// Ends RPC on this worker. If `graceful`, waits until all workers have called it and nothing is in
/// flight anywhere; when `timeout` (zero: no limit) expires, throws an error naming the workers it
/// waits for. Otherwise ends immediately: calls in flight fail, here and on the workers that wait
/// for them.
void shutdown(bool graceful = true, Duration timeout = Duration::zero());

/// This worker's name and id.
WorkerInfo get_worker_info();
/// Throws DistError listing the existing workers if `worker` is not one of them.
WorkerInfo get_worker_info(const To& worker);
std::vector<WorkerInfo> get_worker_infos();
/// This worker's device map to `worker`, of init_rpc's options; empty: none.
DeviceMap get_device_map(const To& worker);
Duration get_rpc_timeout();
/// Timeout of later calls that give none.
void set_rpc_timeout(Duration timeout);

namespace detail {

/// The outcome of a call.
struct Answer {
  /// The callee's exception, or why there is no reply; null on success.
  std::exception_ptr error;
  Value value;
  std::shared_ptr<ValueDelivery> delivery;  ///< for unpacking
};
/// Called once, on the thread that received the reply or detected the failure; must be short.
using Completion = std::function<void(Answer)>;
/// Packs the arguments, on the calling thread, before the call returns.
using PackArguments = std::function<void(Value&, ValueDelivery&)>;

Answer call_and_wait(Agent& agent, const To& to, const std::string& name,
                     const CallOptions& options, PackArguments pack);
void call_later(Agent& agent, const To& to, const std::string& name, const CallOptions& options,
                PackArguments pack, Completion completion);

template <class R, class... A>
R call_and_wait(const To& to, const std::string& name, const CallOptions& options,
                const A&... arguments) {
  const auto agent = current_agent("rpc_sync");
  auto answer = call_and_wait(
      *agent, to, name, options,
      [&](Value& value, ValueDelivery& delivery) { put_arguments(value, delivery, arguments...); });
  if (answer.error) std::rethrow_exception(answer.error);
  return get_result<R>(name, answer.value, *answer.delivery);
}

template <class R, class... A>
Future<R> call_later(const To& to, const std::string& name, const CallOptions& options,
                     const A&... arguments) {
  const auto agent = current_agent("rpc_async");
  auto state = std::make_shared<FutureState<R>>(agent);
  const auto pack = [&](Value& value, ValueDelivery& delivery) {
    put_arguments(value, delivery, arguments...);
  };
  call_later(*agent, to, name, options, pack, [state, name](Answer answer) {
    if (answer.error) {
      state->fail(std::move(answer.error));
      return;
    }
    try {
      if constexpr (std::is_void_v<R>) {
        state->set({});
      } else {
        state->set(get_result<R>(name, answer.value, *answer.delivery));
      }
    } catch (...) {
      state->fail(std::current_exception());
    }
  });
  return Future<R>(std::move(state));
}

/// The result type of calling a function that returns R.
template <class R>
struct Unwrapped {
  using Type = std::remove_cvref_t<R>;
};
template <class T>
struct Unwrapped<Future<T>> {
  using Type = T;
};

}  // namespace detail

/// Runs the function registered as `name`, or torch's operator of that name, on worker `to`.
/// Returns its result of type R, or throws its exception. R = void accepts any result and discards
/// it.
template <class R = void, class... A>
R rpc_sync(const To& to, std::string name, const A&... arguments) {
  return detail::call_and_wait<R>(to, std::move(name), CallOptions{}, arguments...);
}
template <class R = void, class... A>
R rpc_sync(const To& to, std::string name, const CallOptions& options, const A&... arguments) {
  return detail::call_and_wait<R>(to, std::move(name), options, arguments...);
}
/// As rpc_sync, without waiting. Arguments are read before it returns; later changes to them have
/// no effect.
template <class R = void, class... A>
Future<R> rpc_async(const To& to, std::string name, const A&... arguments) {
  return detail::call_later<R>(to, std::move(name), CallOptions{}, arguments...);
}
template <class R = void, class... A>
Future<R> rpc_async(const To& to, std::string name, const CallOptions& options,
                    const A&... arguments) {
  return detail::call_later<R>(to, std::move(name), options, arguments...);
}

/// As above, with a plain function registered on both workers under one name. Arguments are
/// converted to its parameter types before they are sent.
template <class R, class... P>
auto rpc_sync(const To& to, R (*function)(P...),
              const std::type_identity_t<detail::Carried<P>>&... arguments) {
  return detail::call_and_wait<typename detail::Unwrapped<std::remove_cvref_t<R>>::Type>(
      to, name_of_function(reinterpret_cast<const void*>(function)), CallOptions{}, arguments...);
}
template <class R, class... P>
auto rpc_async(const To& to, R (*function)(P...),
               const std::type_identity_t<detail::Carried<P>>&... arguments) {
  return detail::call_later<typename detail::Unwrapped<std::remove_cvref_t<R>>::Type>(
      to, name_of_function(reinterpret_cast<const void*>(function)), CallOptions{}, arguments...);
}

}  // namespace muster::rpc
