#include "muster/rpc/agent.h"

#include <algorithm>
#include <thread>

#include "muster/base/log.h"
#include "muster/rpc/agent_closing.h"
#include "muster/rpc/agent_parts.h"
#include "muster/rpc/errors.h"
#include "muster/wait/spin_wait.h"

namespace muster::rpc {
namespace {

/// Messages that may come before the next look takes them without waiting in the channel.
constexpr std::size_t kSlots = 8;
constexpr std::size_t kLittle = 4096;
constexpr auto kNoExpiry = TimePoint::max().time_since_epoch().count();

void check_names(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& name = names[i];
    const bool proper = !name.empty() && name.size() <= 128 &&
                        std::all_of(name.begin(), name.end(), [](unsigned char c) {
                          return std::isalnum(c) != 0 || c == '_' || c == '-' || c == ':';
                        });
    if (!proper)
      group::invalid(
          "init_rpc: '" + name + "' (rank " + std::to_string(i) +
          ") is no name of a worker: letters, digits, '_', '-' and ':', 1 to 128 of them");
    for (std::size_t j = 0; j < i; ++j) {
      if (names[j] == name)
        group::invalid("init_rpc: ranks " + std::to_string(j) + " and " + std::to_string(i) +
                       " both call themselves '" + name +
                       "'; every worker needs a name of its own");
    }
  }
}

}  // namespace

std::shared_ptr<Agent> Agent::create(std::shared_ptr<transport::Fabric> fabric,
                                     const std::vector<std::string>& names, AgentOptions options) {
  if (static_cast<int>(names.size()) != fabric->world_size())
    group::invalid("an agent needs one name for each of its " +
                   std::to_string(fabric->world_size()) + " workers");
  check_names(names);
  return std::shared_ptr<Agent>(new Agent(std::move(fabric), names, std::move(options)));
}

Agent::Agent(std::shared_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
             AgentOptions options)
    : fabric_(std::move(fabric)),
      channel_(fabric_->agreements()),
      id_(fabric_->rank()),
      options_(std::move(options)),
      rpc_timeout_(options_.rpc_timeout.count()),
      next_expiry_(kNoExpiry),
      peers_(names.size()) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    workers_.push_back(WorkerInfo(names[i], static_cast<int>(i)));
    by_name_[names[i]] = static_cast<int>(i);
  }
  peers_[static_cast<std::size_t>(id_)].known = true;  // as long as this one lives
  slots_.resize(kSlots);
  for (Slot& slot : slots_) {
    slot.buffer.reset(new std::byte[kHeadBytes]);
    post_slot(slot);
  }
  spares_.reserve(2 * kSlots);
  closing_ = std::make_unique<Closing>(*this);
  on(Kind::closing, {[this](Request request) { closing_->take(std::move(request)); },
                     [](const Request&) { return true; }});
}

Agent::~Agent() { stop(); }

void Agent::start() {
  auto made = State::made;
  if (!state_.compare_exchange_strong(made, State::running)) return;
  if (fabric_->threads()) listener_ = std::thread([this] { listen(); });
}

const WorkerInfo& Agent::worker(const To& to) const {
  if (to.name().empty()) {
    if (to.id() >= 0 && to.id() < static_cast<int>(workers_.size()))
      return workers_[static_cast<std::size_t>(to.id())];
    group::invalid("there is no worker of rank " + std::to_string(to.id()) + "; there are " +
                   std::to_string(workers_.size()) + ", from 0 on");
  }
  if (const auto found = by_name_.find(to.name()); found != by_name_.end())
    return workers_[static_cast<std::size_t>(found->second)];
  std::string known;
  for (const auto& worker : workers_) known += (known.empty() ? "'" : ", '") + worker.name() + "'";
  group::invalid("there is no worker '" + to.name() + "'; there are " + known);
}

std::string Agent::describe_worker(int id) const {
  return "worker '" + workers_[static_cast<std::size_t>(id)].name() + "' (rank " +
         std::to_string(id) + ")";
}

std::exception_ptr Agent::loss_error(int peer, const std::string& name, const Status& why) const {
  auto ranks = why.ranks();
  if (ranks.empty()) ranks.push_back(peer);
  const Status failure(
      why.code(),
      "the call of '" + name + "' on " + describe_worker(peer) + " has failed: " + why.message(),
      std::move(ranks));
  try {
    group::raise(failure);
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr Agent::timeout_error(int peer, const std::string& name, Duration timeout) const {
  return std::make_exception_ptr(
      DistBackendError("the call of '" + name + "' on " + describe_worker(peer) +
                           " had no answer within its timeout of " + describe(timeout) +
                           "; give it a longer one, or look at what that worker does",
                       Code::timed_out, {peer}));
}

// ---- calling
// ---------------------------------------------------------------------------------------------------------

Agent::Limit Agent::limit_of(const CallOptions& options) const {
  Limit limit;
  limit.timeout = options.timeout.value_or(rpc_timeout());
  if (limit.timeout < Duration::zero())
    group::invalid("a timeout of a call must not be negative; zero is none");
  if (limit.timeout > Duration::zero()) limit.deadline = deadline_after(clock(), limit.timeout);
  return limit;
}

std::uint64_t Agent::begin_call(Call& call, const Limit& limit, bool expires, Copies copies,
                                Completion completion) {
  if (call.to < 0 || call.to >= static_cast<int>(workers_.size())) worker(To(call.to));  // throws
  const auto deadline = limit.deadline;
  Passage passage(this, call.to);
  Parcel parcel;
  parcel.name = call.name;
  if (call.fill) call.fill(parcel.value, passage);
  Head head;
  head.kind = call.kind;
  head.flags = Head::kWantsAnswer;
  if (call.observed && observer_ && observer_->request_leaves(call.to, parcel))
    head.flags |= Head::kObserved;
  const auto number = head.call = next_call_.fetch_add(1, std::memory_order_relaxed);
  if (deadline != TimePoint::max()) {
    // Packing so little has taken no time worth a look at the clock.
    const bool little = parcel.value.tensors.empty() && parcel.value.bytes.size() <= kLittle;
    head.time_left = little ? limit.timeout.count()
                            : std::max<std::int64_t>((deadline - clock().now()).count(), 0);
  }
  auto message = prepare(call.to, std::move(head), std::move(parcel), copies);
  message.is_call = true;
  const Peer& peer = peers_[static_cast<std::size_t>(call.to)];
  Status gone;
  {
    const std::lock_guard lock(calls_mutex_);
    if (peer.gone.load(std::memory_order_relaxed)) {
      gone = peer.why;
    } else {
      if (expires && deadline.time_since_epoch().count() < next_expiry_.load())
        next_expiry_.store(deadline.time_since_epoch().count());
      Pending pending{call.to, std::move(call.name), expires ? deadline : TimePoint::max(),
                      std::move(completion), passage.take()};
      if (spare_call_.empty()) {
        calls_.emplace(number, std::move(pending));
      } else {
        spare_call_.key() = number;
        spare_call_.mapped() = std::move(pending);
        calls_.insert(std::move(spare_call_));
      }
    }
  }
  if (!gone.ok()) {
    Answer answer;
    answer.error = loss_error(call.to, call.name, gone);
    completion(std::move(answer));
    return number;
  }
  sent_.fetch_add(1, std::memory_order_relaxed);
  launch(std::move(message));
  return number;
}

std::uint64_t Agent::call(Call call, Completion completion) {
  const Use use(*this);
  if (!use)
    throw DistBackendError("RPC of worker '" + self().name() + "' has ended", Code::aborted);
  const auto limit = limit_of(call.options);
  const bool expires = limit.deadline != TimePoint::max();
  if (expires) {
    completion = [inner = std::move(completion), this, to = call.to, name = call.name,
                  timeout = limit.timeout](Answer answer) {
      if (!answer.error && !answer.passage)
        answer.error = timeout_error(to, name, timeout);  // expired
      inner(std::move(answer));
    };
  }
  return begin_call(call, limit, expires, Copies::all, std::move(completion));
}

Answer Agent::call_sync(Call call, const std::function<bool()>& unwanted) {
  const Use use(*this);
  if (!use)
    throw DistBackendError("RPC of worker '" + self().name() + "' has ended", Code::aborted);
  struct Waiting {
    Answer answer;
    std::atomic<bool> done{false};
  } waiting;
  const auto limit = limit_of(call.options);
  const int to = call.to;
  const auto number = begin_call(call, limit, false, Copies::none, [&waiting](Answer answer) {
    waiting.answer = std::move(answer);
    waiting.done.store(true, std::memory_order_release);
  });
  const auto answered = [&waiting] { return waiting.done.load(std::memory_order_acquire); };
  const bool in_time = wait([&] { return answered() || (unwanted && unwanted()); }, limit.deadline);
  if (!answered()) {
    if (auto pending = take_pending(number, to)) {
      give_up(to, number);
      waiting.answer.error =
          in_time
              ? loss_error(to, pending->name, Status(Code::aborted, "it was given up here", {id_}))
              : timeout_error(to, pending->name, limit.timeout);
    } else {
      // Somebody is just writing it.
      yield_until(answered);
    }
  }
  if (outbound_count_.load(std::memory_order_relaxed) > 0) withdraw(number);
  return std::move(waiting.answer);
}

/// Tells the other side that nobody waits any more.
void Agent::give_up(int peer, std::uint64_t call) {
  withdraw(call);
  if (peers_[static_cast<std::size_t>(peer)].gone.load()) return;
  Head head;
  head.kind = Kind::cancel;
  head.call = call;
  launch(prepare(peer, std::move(head), {}, Copies::none));
}

void Agent::cancel(std::uint64_t call, std::exception_ptr error) {
  const Use use(*this);
  auto pending = take_pending(call, -1);
  if (!pending) return;
  if (use) give_up(pending->to, call);
  Answer answer;
  answer.error = std::move(error);
  pending->completion(std::move(answer));
  if (use) fabric_->wake();
}

std::optional<Agent::Pending> Agent::take_pending(std::uint64_t call, int from) {
  const std::lock_guard lock(calls_mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end() || (from >= 0 && found->second.to != from)) return {};
  std::optional<Pending> pending(std::move(found->second));
  spare_call_ = calls_.extract(found);
  return pending;
}

void Agent::expire_calls(TimePoint now) {
  if (now.time_since_epoch().count() < next_expiry_.load(std::memory_order_relaxed)) return;
  std::vector<std::pair<std::uint64_t, Pending>> expired;
  {
    const std::lock_guard lock(calls_mutex_);
    auto next = TimePoint::max();
    for (auto at = calls_.begin(); at != calls_.end();) {
      if (at->second.deadline > now) {
        next = std::min(next, at->second.deadline);
        ++at;
        continue;
      }
      expired.emplace_back(at->first, std::move(at->second));
      at = calls_.erase(at);
    }
    next_expiry_.store(next.time_since_epoch().count());
  }
  for (auto& [number, pending] : expired) {
    give_up(pending.to, number);
    pending.completion({});  // what `call` makes of an empty answer is the timeout
  }
  if (!expired.empty()) fabric_->wake();
}

// ---- lost workers
// ----------------------------------------------------------------------------------------------------

void Agent::lose(int peer, const Status& why) {
  std::vector<Pending> failed;
  {
    const std::lock_guard lock(calls_mutex_);
    Peer& state = peers_[static_cast<std::size_t>(peer)];
    if (state.gone.load()) return;
    state.why = why.ok() ? Status(Code::closed, describe_worker(peer) + " has left", {peer}) : why;
    state.gone.store(true, std::memory_order_release);
    for (auto at = calls_.begin(); at != calls_.end();) {
      if (at->second.to != peer) {
        ++at;
        continue;
      }
      failed.push_back(std::move(at->second));
      at = calls_.erase(at);
    }
  }
  if (logs(LogLevel::info))
    log(LogLevel::info,
        "worker '" + self().name() + "' has lost " + describe_worker(peer) + ": " + why.message());
  for (auto& pending : failed) {
    Answer answer;
    answer.error = loss_error(peer, pending.name, lost(peer));
    pending.completion(std::move(answer));
  }
  {
    // Nobody waits for what it asked for.
    const std::lock_guard lock(serving_mutex_);
    for (auto& [key, weak] : serving_) {
      if (key.first != peer) continue;
      if (auto answering = weak.lock()) answering->cancel();
    }
  }
  for (const auto& callback : loss_callbacks_)
    run_later([callback, peer, why = lost(peer)] { callback(peer, why); });
  fabric_->wake();
}

Status Agent::lost(int worker) const {
  const std::lock_guard lock(calls_mutex_);
  const Peer& peer = peers_[static_cast<std::size_t>(worker)];
  return peer.gone.load() ? peer.why : Status();
}

// ---- serving
// ---------------------------------------------------------------------------------------------------------

void Agent::on(Kind kind, Handler handler) {
  const std::lock_guard lock(handlers_mutex_);
  // Kept for good: a request may be running the one before.
  all_handlers_.push_back(std::make_unique<const Handler>(std::move(handler)));
  handlers_[static_cast<std::size_t>(kind)].store(all_handlers_.back().get(),
                                                  std::memory_order_release);
}

void Agent::observe(std::shared_ptr<Observer> observer) { observer_ = std::move(observer); }
void Agent::add_drain(std::shared_ptr<Drain> drain) { drains_.push_back(std::move(drain)); }
void Agent::on_loss(std::function<void(int worker, const Status& why)> callback) {
  loss_callbacks_.push_back(std::move(callback));
}

Agent::Counts Agent::counts() const {
  Counts counts;
  counts.calls = sent_.load();
  counts.requests = handled_.load();
  counts.inline_runs = inline_runs_.load();
  const std::lock_guard lock(calls_mutex_);
  counts.in_flight = calls_.size();
  return counts;
}

std::shared_ptr<void> Agent::companion_of(const std::type_info* type,
                                          const std::function<std::shared_ptr<void>()>& make) {
  const std::lock_guard lock(companions_mutex_);
  auto& companion = companions_[type];
  if (!companion) companion = make();
  return companion;
}

}  // namespace muster::rpc
