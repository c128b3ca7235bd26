/// Calls to functions on other workers: torch.distributed.rpc's names in namespace `muster::rpc`.
///
///     rpc::register_function("scale", [](at::Tensor t, double by) { return t * by; });
///     rpc::init_rpc("worker0", {.rank = 0, .world_size = 2});
///     auto doubled = rpc::rpc_sync<at::Tensor>("worker1", "scale", torch::ones({2}), 2);
///     auto later = rpc::rpc_async<at::Tensor>("worker1", "aten::add", torch::ones({2}), 3);
///     rpc::shutdown();
///
/// What travels stands in `value.h`, what functions may be in `function.h`. Errors are DistError
/// and its kin (group/errors.h) and what `errors.h` makes of exceptions over there. Everything but
/// init_rpc and shutdown is thread-safe. A worker is a process, or a thread that has bound a scope
/// of its own (`RpcScope`).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/rpc/agent.h"
#include "muster/rpc/errors.h"
#include "muster/rpc/function.h"
#include "muster/rpc/future.h"
#include "muster/rpc/options.h"
#include "muster/store/store.h"

namespace muster::rpc {

/// Where the agent of a worker stands. One belongs to the process; where workers are threads of one
/// process, each binds one of its own. An agent's worker threads belong to its worker's scope.
class RpcScope {
 public:
  /// The calling thread's, else the process's.
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

  RpcScope() = default;
  ~RpcScope();
  /// Null before init_rpc.
  std::shared_ptr<Agent> agent() const;
  void set(std::shared_ptr<Agent> agent);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Agent> agent_;
  int process_ = 0;  // where it was opened: a forked child must not end its parent's
};

/// The calling worker's agent; before init_rpc throws DistError naming `caller`.
std::shared_ptr<Agent> current_agent(std::string_view caller);

/// A kind of agent, by name. `TENSORPIPE` is torch's name for its default and here an alias of the
/// native one.
class BackendType {
 public:
  explicit BackendType(std::string_view name);  ///< throws DistError where nobody has registered it
  static const BackendType NATIVE;
  static const BackendType TENSORPIPE;
  const std::string& name() const { return name_; }  ///< in upper case
  friend bool operator==(const BackendType&, const BackendType&) = default;

 private:
  std::string name_;
};

/// What a backend is asked to make.
struct BackendRequest {
  std::string name;
  int rank = -1;
  int world_size = -1;
  RpcBackendOptions options;
  std::shared_ptr<store::Store> store;  ///< null: options.init_method says where to meet
  Duration join_timeout = std::chrono::minutes(30);
};
/// Makes an agent that has met the others and is not started.
using InitBackend = std::function<std::shared_ptr<Agent>(const BackendRequest&)>;
/// Throws where the name is taken.
BackendType register_backend(const std::string& name, InitBackend init);
bool backend_registered(const std::string& name);

struct InitRpcOptions {
  std::optional<BackendType> backend = {};  ///< absent: native
  int rank = -1;                            ///< -1: from the init method or the environment
  int world_size = -1;
  RpcBackendOptions rpc_backend_options = {};
  std::shared_ptr<store::Store> store =
      nullptr;  ///< in place of the init method; needs rank and world size
  Duration join_timeout = std::chrono::minutes(
      30);  ///< until all workers have come; init_rpc throws naming those that have not
};
/// Joins the workers of the job as `name`; blocks until all have. Names are unique (letters,
/// digits, '_', '-', ':'; at most 128), else every worker throws DistError naming those that took
/// the same. A second call without shutdown throws. Starts RPC only: no process group.
void init_rpc(const std::string& name, const InitRpcOptions& options = {});
/// Joins over a fabric that stands already (tests, simulations). `names[rank]`.
void init_rpc_on(std::unique_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
                 const RpcBackendOptions& options = {});
bool is_initialized();
/// What the layers above (references, autograd) do with every agent before it starts: install their
/// handlers, observer and drains. Add before the first init_rpc.
std::vector<std::function<void(Agent&)>>& extensions();

/// Ends RPC of this worker. Graceful: waits until all workers have called it and nothing is under
/// way anywhere; at the timeout (zero: never) throws naming the workers that it waits for.
/// Otherwise ends at once: what is under way fails, here and for those who wait for it.
void shutdown(bool graceful = true, Duration timeout = Duration::zero());

/// Of this worker.
WorkerInfo get_worker_info();
/// Throws DistError naming those there are.
WorkerInfo get_worker_info(const To& worker);
std::vector<WorkerInfo> get_worker_infos();
Duration get_rpc_timeout();
/// Of calls from now on that say none.
void set_rpc_timeout(Duration timeout);

namespace detail {

template <class... A>
Agent::Call make_call(const Agent& agent, const To& to, std::string name,
                      const CallOptions& options, const A&... arguments) {
  Agent::Call call;
  call.to = agent.worker(to).id();
  call.name = std::move(name);
  call.options = options;
  // Run before the call returns: references will do.
  call.fill = [&](Value& value, Passage& passage) { put_arguments(value, passage, arguments...); };
  return call;
}

template <class R, class... A>
R call_and_wait(const To& to, std::string name, const CallOptions& options, const A&... arguments) {
  const auto agent = current_agent("rpc_sync");
  auto answer = agent->call_sync(make_call(*agent, to, name, options, arguments...));
  if (answer.error) std::rethrow_exception(answer.error);
  return get_result<R>(name, answer.parcel.value, *answer.passage);
}

template <class R, class... A>
Future<R> call_later(const To& to, std::string name, const CallOptions& options,
                     const A&... arguments) {
  const auto agent = current_agent("rpc_async");
  auto state = std::make_shared<FutureState<R>>(agent);
  auto call = make_call(*agent, to, name, options, arguments...);
  agent->call(std::move(call), [state, name = std::move(name)](Answer answer) {
    if (answer.error) {
      state->fail(std::move(answer.error));
      return;
    }
    try {
      if constexpr (std::is_void_v<R>) {
        state->set({});
      } else {
        state->set(get_result<R>(name, answer.parcel.value, *answer.passage));
      }
    } catch (...) {
      state->fail(std::current_exception());
    }
  });
  return Future<R>(std::move(state));
}

/// What a call of a function that returns R gives.
template <class R>
struct Unwrapped {
  using Type = std::remove_cvref_t<R>;
};
template <class T>
struct Unwrapped<Future<T>> {
  using Type = T;
};

}  // namespace detail

/// Runs the function registered as `name` (or torch's operator) on worker `to` and returns its
/// result, or throws what it threw. R: the result's type; void takes any result and drops it.
template <class R = void, class... A>
R rpc_sync(const To& to, std::string name, const A&... arguments) {
  return detail::call_and_wait<R>(to, std::move(name), CallOptions{}, arguments...);
}
template <class R = void, class... A>
R rpc_sync(const To& to, std::string name, const CallOptions& options, const A&... arguments) {
  return detail::call_and_wait<R>(to, std::move(name), options, arguments...);
}
/// The same without waiting. Arguments are read before it returns: later changes to them do not
/// show.
template <class R = void, class... A>
Future<R> rpc_async(const To& to, std::string name, const A&... arguments) {
  return detail::call_later<R>(to, std::move(name), CallOptions{}, arguments...);
}
template <class R = void, class... A>
Future<R> rpc_async(const To& to, std::string name, const CallOptions& options,
                    const A&... arguments) {
  return detail::call_later<R>(to, std::move(name), options, arguments...);
}

/// The same by a plain function that was registered, here and there, under one name: arguments are
/// converted to its parameters' types before they leave.
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
