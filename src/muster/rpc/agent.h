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
/// that found the message; all others, and futures' callbacks, on a pool of at most
/// `num_worker_threads` threads, which start when first needed.
///
/// Failure. A peer that dies, leaves or sends what cannot be read fails exactly the calls that wait
/// for it, at once, naming it; calls to others go on. A call that nobody waits for any more
/// (timeout) is cancelled over there where it has not begun.
///
/// Back-pressure is the channel's: a peer that does not take its messages leaves them with the
/// sender, within the fabric's credit.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "muster/rpc/kept_value.h"
#include "muster/rpc/message.h"
#include "muster/rpc/options.h"
#include "muster/rpc/value.h"
#include "muster/transport/fabric.h"
#include "muster/wait/core_offer.h"

namespace muster::rpc {

/// How a request is answered: once, from any thread, now or later. One that is dropped without an
/// answer fails the call.
class Responder {
 public:
  virtual ~Responder() = default;
  /// Packs and sends the result. `fill(value, passage)` runs on this thread. Where it throws, that
  /// is the answer.
  virtual void reply(const std::function<void(Value&, Passage&)>& fill) = 0;
  virtual void fail(std::exception_ptr error) = 0;
  /// Nobody waits for the answer any more.
  virtual bool cancelled() const = 0;
  /// Where the result is not to travel but to stay, as it is: then `keep` takes it in place of
  /// `reply`.
  virtual bool keeps() const { return false; }
  virtual void keep(KeptValue) {}
};
using ResponderRef = std::shared_ptr<Responder>;

/// A message that wants something of this worker.
struct Request {
  int from = -1;
  Kind kind = Kind::call;
  Parcel parcel;
  TimePoint deadline = TimePoint::max();  ///< after which nobody waits for the answer
  ResponderRef responder;                 ///< null where no answer is wanted
  /// For unpacking the parcel: unpack<T>(parcel.value, *passage). What it gets to wait for is
  /// waited for before the answer leaves.
  std::shared_ptr<Passage> passage;
};

struct Handler {
  /// Exceptions become the answer.
  std::function<void(Request)> run;
  /// Whether this one never waits and takes some microseconds at most: then it runs on the thread
  /// that found it, which may be a caller's. Empty: never.
  std::function<bool(const Request&)> is_short;
};

/// The answer to a call.
struct Answer {
  std::exception_ptr
      error;  ///< what was thrown over there, or why there is no answer; null: all went well
  Parcel parcel;
  std::shared_ptr<Passage> passage;  ///< for unpacking
};
/// Called once, on the thread that found the answer, or saw the failure; must be short.
using Completion = std::function<void(Answer)>;

struct CallOptions {
  std::optional<Duration> timeout = {};  ///< zero: never; absent: the agent's
};

/// Sees what leaves and arrives with calls (Kind::call, and other kinds that ask for it): by it
/// autograd records its send and receive functions and tells the other side which context they
/// belong to.
class Observer {
 public:
  /// What belongs to one request while it is handled here. `enter` and `leave` are called around
  /// its handler on the thread that runs it.
  struct Scope {
    virtual ~Scope() = default;
    virtual void enter() {}
    virtual void leave() {}
  };
  virtual ~Observer() = default;
  /// The caller's thread, once per call, before the value is sent. May write `note` and replace
  /// tensors. True: the answer is of interest, and the other side's observer sees the request.
  virtual bool request_leaves(int to, Parcel& parcel) = 0;
  /// The callee, on the thread that is to run the handler. May replace tensors. May return null.
  virtual std::shared_ptr<Scope> request_arrives(int from, Parcel& parcel) = 0;
  /// The callee, before a result (not an error) is sent, with what request_arrives returned.
  virtual void reply_leaves(int to, Parcel& parcel, const std::shared_ptr<Scope>& scope) = 0;
  /// The caller, before the result is handed over. Any thread.
  virtual void reply_arrives(int from, Parcel& parcel) = 0;
};

/// Takes part in the graceful end. All calls come on the thread that shuts down.
class Drain {
 public:
  virtual ~Drain() = default;
  /// Every worker has come to its shutdown; from now on nothing new is made by users.
  virtual void begin() {}
  /// Asked again and again while messages are driven: nothing of this worker waits for others, or
  /// is held by others, any more.
  virtual bool idle() = 0;
  /// "3 references to worker 'ps'", for the error at the deadline; empty where it is idle.
  virtual std::string waits_for() const { return {}; }
};

struct AgentOptions {
  Duration rpc_timeout = kDefaultRpcTimeout;
  int num_worker_threads = kDefaultWorkerThreads;
  std::map<std::string, DeviceMap> device_maps;  ///< this worker's, by callee
  /// The maps of the others to this worker, by caller: answers use their inverse.
  std::map<std::string, DeviceMap> maps_of_callers;
  /// Bound to every thread that the agent starts, as long as it runs (which worker a thread belongs
  /// to, where workers are threads of one process).
  std::function<std::shared_ptr<void>()> bind_thread;
  /// Held until all workers have come to the graceful end, else until this one ends: the store by
  /// which they met.
  std::shared_ptr<void> meeting_place;
};

class Agent : public std::enable_shared_from_this<Agent> {
 public:
  /// `names[rank]`, all different. The fabric must be this agent's alone: calls use its
  /// `agreements()` channel. Handlers may be added until `start`; messages that come before wait.
  static std::shared_ptr<Agent> create(std::shared_ptr<transport::Fabric> fabric,
                                       const std::vector<std::string>& names, AgentOptions options);
  /// Ends at once, as `stop`.
  ~Agent();
  void start();

  const WorkerInfo& self() const { return workers_[static_cast<std::size_t>(id_)]; }
  std::span<const WorkerInfo> workers() const { return workers_; }
  /// Throws DistError naming those there are.
  const WorkerInfo& worker(const To& to) const;
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
  void on(Kind kind, Handler handler);
  /// At most one; null: none. Before the first call.
  void observe(std::shared_ptr<Observer> observer);
  void add_drain(std::shared_ptr<Drain> drain);
  /// Hears of every worker that is lost (died, left before its time, broke the protocol), on a
  /// worker thread.
  void on_loss(std::function<void(int worker, const Status& why)> callback);
  /// Why `worker` cannot be called any more; success while it can.
  Status lost(int worker) const;
  /// Keeps for ever what must live as long as the agent (contexts of the layers above). By type,
  /// made by the first who asks.
  template <class T>
  std::shared_ptr<T> companion(const std::function<std::shared_ptr<T>()>& make) {
    return std::static_pointer_cast<T>(
        companion_of(&typeid(T), [&]() -> std::shared_ptr<void> { return make(); }));
  }

  // ---- threads

  /// True once `done()` holds, false at the deadline; drives messages meanwhile. `done` is asked
  /// often and must be quick.
  bool wait(const std::function<bool()>& done, TimePoint deadline);
  /// What a thread waits for with `wait` has changed.
  void wake();
  /// On a worker thread. False where the agent has ended: it will not run.
  bool run_later(std::function<void()> task);

  // ---- the end

  /// Waits until every worker has come here and nothing is under way anywhere: calls answered,
  /// drains idle. Then `stop`. At the deadline throws DistError (timed_out) naming the workers that
  /// it waits for; the agent is stopped then too.
  void shut_down(Duration timeout);
  /// Ends here and now: calls under way fail with Code::aborted, handlers that run are waited for.
  void stop();
  bool running() const { return state_.load() == State::running; }

  /// How much happened, for tests and benchmarks.
  struct Counts {
    std::uint64_t calls = 0;        ///< sent
    std::uint64_t requests = 0;     ///< handled here
    std::uint64_t inline_runs = 0;  ///< of those, on the thread that found them
    std::size_t in_flight = 0;      ///< calls without an answer
  };
  Counts counts() const;

 private:
  enum class State : std::uint8_t { made, running, stopped };
  /// Which large tensors are copied before they are sent: those of arguments that are read later,
  /// or of results that others have too.
  enum class Copies : std::uint8_t { none, where_shared, all };
  struct Slot;
  struct Inbound;
  struct Outbound;
  struct Peer;
  struct Pending {
    int to = -1;
    std::string name;
    TimePoint deadline = TimePoint::max();  // where somebody must look after it
    Completion completion;
    std::shared_ptr<Passage> passage;  // what it keeps; null: nothing
  };
  /// Until when a call may take.
  struct Limit {
    Duration timeout{};
    TimePoint deadline = TimePoint::max();
  };
  class Answering;
  class Closing;
  class Use;
  friend class Answering;
  friend class Closing;

  Agent(std::shared_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
        AgentOptions options);

  // agent.cc: calls and their ends
  std::uint64_t begin_call(Call& call, const Limit& limit, bool expires, Copies copies,
                           Completion completion);
  std::optional<Pending> take_pending(std::uint64_t call, int from);
  void expire_calls(TimePoint now);
  void lose(int peer, const Status& why);
  std::exception_ptr loss_error(int peer, const std::string& name, const Status& why) const;
  std::exception_ptr timeout_error(int peer, const std::string& name, Duration timeout) const;
  void give_up(int peer, std::uint64_t call);
  std::string describe_worker(int id) const;
  Limit limit_of(const CallOptions& options) const;

  // agent_outbound.cc: what leaves
  Outbound prepare(int to, Head head, Parcel parcel, Copies copies);
  void launch(Outbound message);
  void sweep_outbound();
  void withdraw(std::uint64_t call);
  DeviceMapping devices_towards(int to) const;

  // agent_inbound.cc: what comes
  bool progress();
  bool look();
  struct Found;
  struct News;
  void collect(News& news);
  void sweep_held_back();
  void contact(int peer);
  void post_slot(Slot& slot);
  void post_slots();
  void receive_head(int from, ConstBytes bytes);
  void begin_apart(std::shared_ptr<Inbound> inbound);
  void finish_stage(const std::shared_ptr<Inbound>& inbound);
  void dispatch(int from, const Head& head, Parcel parcel);
  void take_request(int from, const Head& head, Parcel parcel);
  void take_answer(int from, const Head& head, Parcel parcel);
  void take_cancel(int from, std::uint64_t call);
  void run_handler(const Handler& handler, Request request, bool observed, bool unwanted);

  // agent_threads.cc: listener, pool, the end
  void listen();
  void stand_by();
  void work();
  std::shared_ptr<void> companion_of(const std::type_info* type,
                                     const std::function<std::shared_ptr<void>()>& make);
  bool quiet();
  void fail_all();

  std::shared_ptr<transport::Fabric> fabric_;
  transport::Channel& channel_;
  const int id_;
  std::vector<WorkerInfo> workers_;
  std::map<std::string, int, std::less<>> by_name_;
  AgentOptions options_;
  std::atomic<std::int64_t> rpc_timeout_;
  std::atomic<State> state_{State::made};
  std::atomic<int> users_{0};  // threads inside, which the end waits for

  // Calls.
  mutable std::mutex calls_mutex_;
  std::unordered_map<std::uint64_t, Pending> calls_;
  decltype(calls_)::node_type
      spare_call_;  // of the call that ended last: the next one needs no memory
  std::atomic<std::uint64_t> next_call_{1};
  std::atomic<TimePoint::rep> next_expiry_;

  std::vector<Peer> peers_;

  // What comes: under look_mutex_, which is held while looking only.
  std::mutex look_mutex_;
  std::vector<Slot> slots_;
  std::size_t unposted_ =
      0;  // slots whose message was taken; posted again when there is time, or half of them are
  std::vector<std::unique_ptr<std::byte[]>> spares_;
  std::vector<int> contacted_;
  std::vector<std::shared_ptr<Inbound>> inbound_;
  std::array<std::atomic<const Handler*>, 256> handlers_{};
  std::mutex handlers_mutex_;
  std::vector<std::unique_ptr<const Handler>> all_handlers_;
  std::shared_ptr<Observer> observer_;
  std::vector<std::function<void(int, const Status&)>> loss_callbacks_;

  // What leaves and is not sent yet.
  std::mutex outbound_mutex_;
  std::vector<std::unique_ptr<Outbound>> outbound_;
  std::atomic<std::size_t> outbound_count_{0};

  // Requests under way here: for cancel, and for the end.
  std::mutex serving_mutex_;
  std::map<std::pair<int, std::uint64_t>, std::weak_ptr<Answering>> serving_;
  std::vector<std::function<bool()>> held_back_;  // answers that wait for something; true once sent
  std::atomic<std::size_t> held_back_count_{0};
  std::atomic<std::int64_t> unanswered_{0};

  // Threads.
  std::thread listener_;
  std::atomic<int> pollers_{0};
  std::atomic<int> idle_polls_{CoreOffer::kManyPolls};  // before a waiter offers its core
  std::atomic<std::uint64_t> poller_entries_{0};
  std::atomic<bool> dozing_{false};
  std::mutex pool_mutex_;
  std::condition_variable pool_changed_;
  std::condition_variable listener_wanted_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> pool_;
  int idle_workers_ = 0;
  std::atomic<std::int64_t> busy_{0};  // tasks that wait or run
  std::mutex ending_mutex_;            // one thread ends it

  std::mutex companions_mutex_;
  std::map<const std::type_info*, std::shared_ptr<void>> companions_;
  std::vector<std::shared_ptr<Drain>> drains_;
  std::unique_ptr<Closing> closing_;

  std::atomic<std::uint64_t> sent_{0};     // calls and messages without an answer
  std::atomic<std::uint64_t> handled_{0};  // of others' here
  std::atomic<std::uint64_t> inline_runs_{0};
};

}  // namespace muster::rpc
