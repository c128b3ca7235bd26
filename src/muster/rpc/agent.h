/// One worker's end of all calls: requests and answers over a fabric, many in flight to every peer,
/// answered in any order.
///
/// What lives in `rpc/`: the wire form (`message.h`, no torch), values (`value.h`), this agent, the
/// registry of functions (`function.h`), and what users see (`rpc.h`). It stands on transport/ and
/// knows no sockets: the same agent runs over the in-memory fabric. Of group/ it uses the
/// exceptions only. Test it alone: `ctest -R rpc`.
///
/// Threads. Whoever waits for an answer drives the fabric on its own thread: no hand-over between
/// the bytes and the waiting caller. While nobody waits, the agent's listener thread does; asleep
/// it is woken through the fabric's mailbox. Handlers that say they are short run on the thread
/// that found the message; all others on a pool of at most `num_worker_threads` threads, which
/// start when first needed. Futures' callbacks run on threads of the CallbackExecutor: they may
/// wait for one another to any depth.
///
/// Failure. A peer that dies, leaves or sends what cannot be read fails exactly the calls that wait
/// for it, at once, naming it; calls to others go on. A call that nobody waits for any more
/// (timeout) is cancelled over there where it has not begun.
///
/// Back-pressure is the channel's: a peer that does not take its messages leaves them with the
/// sender, within the fabric's credit.
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

#include "muster/rpc/agent_life.h"
#include "muster/rpc/call_table.h"
#include "muster/rpc/handler.h"
#include "muster/rpc/inbox.h"
#include "muster/rpc/listener.h"
#include "muster/rpc/options.h"
#include "muster/rpc/outbox.h"
#include "muster/rpc/request_server.h"
#include "muster/rpc/worker_pool.h"
#include "muster/rpc/worker_table.h"
#include "muster/transport/fabric.h"

namespace muster::rpc {

struct CallOptions {
  std::optional<Duration> timeout = {};  ///< zero: never; absent: the agent's
};

struct AgentOptions {
  Duration rpc_timeout = kDefaultRpcTimeout;
  int num_worker_threads = kDefaultWorkerThreads;
  std::map<std::string, DeviceMap> device_maps;  ///< this worker's, by callee
  /// The maps of the others to this worker, by caller: answers use their inverse.
  std::map<std::string, DeviceMap> maps_of_callers;
  BindThread bind_thread;  ///< bound to every thread that the agent starts, as long as it runs
  /// Held until all workers have come to the graceful end, else until this one ends: the store by
  /// which they met.
  std::shared_ptr<void> meeting_place;
};

class Agent final : public std::enable_shared_from_this<Agent>, private InboxEvents {
 public:
  /// `names[rank]`, all different. The fabric must be this agent's alone: calls use its
  /// `agreements()` channel. Handlers may be added until `start`; messages that come before wait.
  static std::shared_ptr<Agent> create(std::shared_ptr<transport::Fabric> fabric,
                                       const std::vector<std::string>& names, AgentOptions options);
  /// Ends at once, as `stop`.
  ~Agent();
  void start();

  const WorkerInfo& self() const { return workers_.self(); }
  std::span<const WorkerInfo> workers() const { return workers_.all(); }
  /// Throws DistError naming those there are.
  const WorkerInfo& worker(const To& to) const { return workers_.find(to); }
  transport::Fabric& fabric() { return *fabric_; }
  const Clock& clock() const { return fabric_->clock(); }
  Duration rpc_timeout() const { return Duration(rpc_timeout_.load()); }
  void set_rpc_timeout(Duration timeout) { rpc_timeout_.store(timeout.count()); }

  // ---- calling

  /// What to call. `fill` packs the arguments, on the calling thread, before `call` returns; it may
  /// throw.
  struct Call {
    int to = -1;
    Kind kind = Kind::call;
    std::string name;
    std::function<void(Value&, Passage&)> fill;
    CallOptions options;
    bool observed = true;  ///< the observer sees it
  };
  /// Sends, never waits for the answer. Arguments are copied where they are not sent at once: later
  /// changes do not show. The returned number is for `cancel`. Throws what `fill` throws, and
  /// DistError for a worker that is not there; a dead one fails the completion.
  std::uint64_t call(Call call, Completion completion);
  /// Sends and waits for the answer; tensors are read while it waits. Errors are in the answer.
  /// Throws as `call`. Once `unwanted()` holds (whoever makes that true calls `wake`) the call is
  /// given up as at its timeout, with Code::aborted.
  Answer call_sync(Call call, const std::function<bool()>& unwanted = {});
  /// A message that wants no answer. To a lost worker: nothing happens.
  void post(Call message);
  /// Gives a call up: its completion gets `error`, unless it is completed already; the other side
  /// is told.
  void cancel(std::uint64_t call, std::exception_ptr error);

  // ---- serving

  /// What answers messages of this kind, in place of who did before.
  void on(Kind kind, Handler handler) { server_.on(kind, std::move(handler)); }
  /// At most one; null: none. Before the first call.
  void observe(std::shared_ptr<Observer> observer) { server_.observe(std::move(observer)); }
  void add_drain(std::shared_ptr<Drain> drain);
  /// Hears of every worker that is lost (died, left before its time, broke the protocol), on a
  /// worker thread.
  void on_loss(std::function<void(int worker, const Status& why)> callback);
  /// Why `worker` cannot be called any more; success while it can.
  Status lost(int worker) const { return calls_.why_lost(worker); }
  /// Keeps for ever what must live as long as the agent (contexts of the layers above). By type,
  /// made by the first who asks.
  template <class T>
  std::shared_ptr<T> companion(const std::function<std::shared_ptr<T>()>& make) {
    const std::lock_guard lock(companions_.mutex);
    auto& companion = companions_.by_type[&typeid(T)];
    if (!companion) companion = make();
    return std::static_pointer_cast<T>(companion);
  }

  // ---- threads

  /// True once `done()` holds, false at the deadline; drives messages meanwhile. `done` is asked
  /// often and must be quick.
  bool wait(const std::function<bool()>& done, TimePoint deadline);
  /// What a thread waits for with `wait` has changed.
  void wake();
  /// On a worker thread. False where it will not run: the agent has ended, or gets no thread.
  bool run_later(std::function<void()> task) { return pool_.run(std::move(task)); }
  /// Code of the user's, on a thread of its own, bound as a worker thread is. It may wait for other
  /// callbacks. The end of the agent waits until it has returned.
  void run_callback(std::function<void()> callback) {
    pool_.run_callback(shared_from_this(), std::move(callback));
  }

  // ---- the end

  /// Waits until every worker has come here and nothing is under way anywhere: calls answered,
  /// drains idle. Then `stop`. At the deadline throws DistError (timed_out) naming the workers that
  /// it waits for; the agent is stopped then too.
  void shut_down(Duration timeout);
  /// Ends here and now: calls under way fail with Code::aborted, handlers that run are waited for.
  void stop();
  bool running() const { return life_.state() == AgentLife::State::running; }

  /// How much happened, for tests and benchmarks.
  struct Counts {
    std::uint64_t calls = 0;        ///< sent
    std::uint64_t requests = 0;     ///< handled here
    std::uint64_t inline_runs = 0;  ///< of those, on the thread that found them
    std::size_t in_flight = 0;      ///< calls without an answer
  };
  Counts counts() const;

 private:
  class Closing;
  /// Until when a call may take.
  struct Limit {
    Duration timeout{};
    TimePoint deadline = TimePoint::max();
  };

  Agent(std::shared_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
        AgentOptions options);

  // InboxEvents.
  void on_message(int from, const Head& head, Parcel parcel) override;
  void on_loss(int peer, const Status& why) override;
  bool guarded_progress();
  void on_answer(int from, const Head& head, Parcel parcel);

  Limit limit_of(const CallOptions& options) const;
  std::uint64_t begin_call(Call& call, const Limit& limit, bool expires, Copies copies,
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
  std::vector<std::function<void(int, const Status&)>> loss_callbacks_;
  struct {
    std::mutex mutex;
    std::map<const std::type_info*, std::shared_ptr<void>> by_type;
  } companions_;
  std::unique_ptr<Closing> closing_;
  std::mutex ending_mutex_;  // one thread ends it
};

}  // namespace muster::rpc
