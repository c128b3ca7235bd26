// SPDX-License-Identifier: BSD-3-Clause
/// One worker's endpoint of all calls: requests and replies over a fabric, many in flight to every
/// peer, answered in any order.
///
/// `rpc/` holds the wire format (`wire/message.h`, no torch), values (`muster/rpc_value.h`), this
/// agent, the registry of functions (`functions.h`) and the user interface (`muster/rpc.h`). It
/// builds on transport/ and uses no sockets itself: the same agent runs over the in-memory fabric.
/// From group/ it uses only the exceptions. Its tests: `ctest -R rpc`.
///
/// Threads. A thread that waits for a reply drives the fabric itself, so there is no thread switch
/// between the bytes and the waiting caller. While no thread waits, the agent's listener thread
/// drives it; when asleep, it is woken through the fabric's mailbox. Short handlers run on the
/// thread that received the message; all others run on a pool of at most `num_worker_threads`
/// threads, started on demand. Callbacks of futures run on threads of the CallbackExecutor and may
/// wait for one another to any depth.
///
/// Failure. A peer that dies, leaves or sends an unreadable message immediately fails exactly the
/// calls that wait for it, with an error that names it; other calls continue. A call that times out
/// is cancelled on the callee if it has not started there.
///
/// Back-pressure is the channel's, and of bytes only: messages that a peer does not accept stay
/// with the sender, within the fabric's credit. Requests that have been received wait for a thread
/// of the pool without a limit.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "core/transport/fabric.h"
#include "muster/rpc_calls.h"
#include "muster/rpc_options.h"
#include "rpc/agent/agent_threads.h"
#include "rpc/agent/call_table.h"
#include "rpc/agent/handler.h"
#include "rpc/agent/inbox.h"
#include "rpc/agent/outbox.h"
#include "rpc/agent/request_server.h"
#include "rpc/agent/worker_table.h"

namespace muster::rpc {

using detail::Answer;
using detail::Completion;

struct AgentOptions {
  Duration rpc_timeout = kDefaultRpcTimeout;
  int num_worker_threads = kDefaultWorkerThreads;
  std::map<std::string, DeviceMap> device_maps;  ///< this worker's, by callee
  /// The other workers' maps to this worker, by caller; replies use their inverse.
  std::map<std::string, DeviceMap> maps_of_callers;
  BindThread bind_thread;  ///< bound to every thread the agent starts while it runs
  /// Kept alive until all workers have reached the graceful shutdown, or until this agent is
  /// destroyed: the store through which they met.
  std::shared_ptr<void> meeting_place;
};

class Agent final : public std::enable_shared_from_this<Agent>, private InboxEvents {
 public:
  /// `names[rank]`, all different. The fabric must be used by this agent only: calls use its
  /// `agreements()` channel. Handlers may be added until `start`; earlier messages are held back.
  static std::shared_ptr<Agent> create(std::shared_ptr<transport::Fabric> fabric,
                                       const std::vector<std::string>& names, AgentOptions options);
  /// Calls `stop`.
  ~Agent();
  void start();

  const WorkerInfo& self() const { return workers_.self(); }
  std::span<const WorkerInfo> workers() const { return workers_.all(); }
  /// Throws DistError listing the workers if `to` is not one of them.
  const WorkerInfo& worker(const To& to) const { return workers_.find(to); }
  transport::Fabric& fabric() { return *fabric_; }
  const Clock& clock() const { return fabric_->clock(); }
  /// This worker's device map to `worker`; empty: none.
  DeviceMap device_map(const WorkerInfo& worker) const;
  Duration rpc_timeout() const { return Duration(rpc_timeout_.load()); }
  void set_rpc_timeout(Duration timeout) { rpc_timeout_.store(timeout.count()); }

  // ---- calling

  /// A call to make. `fill` packs the arguments on the calling thread before `call` returns; it may
  /// throw.
  struct OutgoingCall {
    int to = -1;
    MessageKind kind = MessageKind::call;
    std::string name;
    std::function<void(Value&, ValueDelivery&)> fill;
    CallOptions options;
    bool observed = true;  ///< the observer sees it
  };
  /// Sends the call without waiting for the reply. Arguments that are not sent immediately are
  /// copied; later changes to them have no effect. Returns a number for `cancel`. Throws what
  /// `fill` throws, and DistError for an unknown worker; a dead worker fails the completion.
  std::uint64_t call(OutgoingCall call, Completion completion);
  /// Sends the call and waits for the reply; tensors are read during the wait. Errors are returned
  /// in the answer; throws as `call` does. Once `unwanted()` returns true (the thread that makes it
  /// true calls `wake`), the call is abandoned as on a timeout, with Code::aborted.
  Answer call_sync(OutgoingCall call, const std::function<bool()>& unwanted = {});
  /// Sends a message that expects no reply. Does nothing if the worker is lost.
  void post(OutgoingCall call);
  /// Abandons a call: its completion receives `error` unless it has already completed, and the
  /// callee is told.
  void cancel(std::uint64_t call, std::exception_ptr error);

  // ---- serving

  /// Sets the handler of messages of this kind, replacing the previous one.
  void on(MessageKind kind, Handler handler) { server_.on(kind, std::move(handler)); }
  /// Sets the observer; null: none. Call before the first call.
  void observe(std::shared_ptr<Observer> observer) { server_.observe(std::move(observer)); }
  void add_drain(std::shared_ptr<Drain> drain);
  /// `callback` runs for every worker that is lost: died, left early or violated the protocol. It
  /// runs on a worker thread, or, if none can be started, on the thread that noticed the loss.
  void on_loss(std::function<void(int worker, const Status& why)> callback);
  /// Why `worker` can no longer be called; ok while it can.
  Status lost(int worker) const { return calls_.why_lost(worker); }
  /// Returns the object of type T owned by this agent (contexts of the layers above); the first
  /// caller creates it.
  template <class T>
  std::shared_ptr<T> companion(const std::function<std::shared_ptr<T>()>& make) {
    const std::lock_guard lock(companions_.mutex);
    auto& companion = companions_.by_type[&typeid(T)];
    if (!companion) companion = make();
    return std::static_pointer_cast<T>(companion);
  }

  // ---- threads

  /// Drives messages until `done()` returns true, or returns false at the deadline. `done` is
  /// called often and must be fast.
  bool wait(const std::function<bool()>& done, TimePoint deadline);
  /// Wakes threads in `wait` to re-evaluate their condition.
  void wake();
  /// Runs `task` on a worker thread. Returns false if it will not run because the agent has ended
  /// or no thread is available.
  bool run_later(std::function<void()> task) { return pool_.run(std::move(task)); }
  /// Runs user code on its own thread, bound like a worker thread. It may wait for other callbacks.
  /// The agent's shutdown waits for it to return.
  void run_callback(std::function<void()> callback) {
    pool_.run_callback(shared_from_this(), std::move(callback));
  }

  // ---- the end

  /// Waits until every worker has called it and nothing is in flight anywhere (calls answered,
  /// drains idle), then calls `stop`. At the deadline throws DistError (timed_out) naming the
  /// workers it waits for; the agent is stopped then too.
  void shut_down(Duration timeout);
  /// Stops immediately: calls in flight fail with Code::aborted; running handlers are waited for.
  void stop();
  bool running() const { return life_.state() == AgentLife::State::running; }

  /// Counters for tests and benchmarks.
  struct Counts {
    std::uint64_t calls = 0;        ///< sent
    std::uint64_t requests = 0;     ///< handled here
    std::uint64_t inline_runs = 0;  ///< requests handled on the receiving thread
    std::size_t in_flight = 0;      ///< calls without a reply
  };
  Counts counts() const;

 private:
  class AgentClosing;
  /// A call's time limit.
  struct Limit {
    Duration timeout{};
    TimePoint deadline = TimePoint::max();
  };

  Agent(std::shared_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
        AgentOptions options);

  // InboxEvents.
  void on_message(int from, RpcMessage message) override;
  void on_loss(int peer, const Status& why) override;
  bool guarded_progress();
  void on_answer(int from, RpcMessage message);

  Limit limit_of(const CallOptions& options) const;
  std::uint64_t begin_call(OutgoingCall& call, const Limit& limit, bool expires, Copies copies,
                           Completion completion);
  void give_up(int peer, std::uint64_t call);
  void expire_calls();
  bool progress();
  bool quiet();
  void fail_all();

  std::shared_ptr<transport::Fabric> fabric_;
  const WorkerTable workers_;
  AgentOptions options_;
  std::atomic<std::int64_t> rpc_timeout_;
  AgentLife life_;
  CallTable calls_;
  Inbox inbox_;
  Outbox outbox_;
  WorkerPool pool_;
  RequestServer server_;
  Listener listener_;
  std::vector<std::function<void(int, const Status&)>> loss_callbacks_;  // fixed by `start`
  struct {
    std::mutex mutex;
    std::map<const std::type_info*, std::shared_ptr<void>> by_type;
  } companions_;
  std::unique_ptr<AgentClosing> closing_;
  std::mutex ending_mutex_;  // serialises shutdown
};

}  // namespace muster::rpc
