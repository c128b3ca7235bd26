// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rpc_calls.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/rendezvous/rendezvous.h"
#include "core/store/signed_texts.h"
#include "core/transport/job_fabric.h"
#include "core/tunables/tunables_fixed.h"
#include "rpc/agent/agent.h"
#include "rpc/agent/worker_table.h"
#include "rpc/backends.h"
#include "rpc/extensions.h"
#include "rpc/functions.h"

namespace muster::rpc {
namespace {

thread_local std::shared_ptr<RpcScope> bound;

const std::shared_ptr<RpcScope>& of_process() {
  static const auto scope = std::make_shared<RpcScope>();
  return scope;
}

/// Large tensors pass through the ring in pieces. With room for several pieces the two sides rarely
/// wait for each other.
constexpr std::size_t kRingBytes = 2 * fixed::kFragmentBytes;

std::string upper(std::string_view name) {
  std::string text(name);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

struct Backends {
  std::mutex mutex;
  std::map<std::string, InitBackend> by_name;
};
std::shared_ptr<Agent> init_native(const BackendRequest& request);
Backends& backends() {
  static auto* all = [] {
    auto* made = new Backends;
    made->by_name["NATIVE"] = init_native;
    made->by_name["TENSORPIPE"] = init_native;
    return made;
  }();
  return *all;
}

AgentOptions agent_options(const RpcBackendOptions& options) {
  AgentOptions made;
  made.rpc_timeout = options.rpc_timeout;
  made.num_worker_threads = options.num_worker_threads;
  made.device_maps = options.device_maps;
  made.bind_thread = [scope = RpcScope::current()]() -> std::shared_ptr<void> {
    return std::make_shared<RpcScope::Binding>(scope);
  };
  return made;
}

void check_maps(const std::vector<Introduction>& workers) {
  for (const auto& worker : workers) {
    for (const auto& [to, map] : worker.device_maps) {
      if (std::none_of(workers.begin(), workers.end(),
                       [&name = to](const Introduction& other) { return other.name == name; }))
        group::invalid("init_rpc: worker '" + worker.name + "' has a device map to '" + to +
                       "', and there is no worker of that name");
    }
  }
}

/// The native agent: over sockets and shared memory.
std::shared_ptr<Agent> join_workers(const BackendRequest& request, const store::Rendezvous& found,
                                    TimePoint deadline) {
  // The device maps are exchanged with the names, because replies use the callers' maps.
  const auto secret = Secret::from_environment();
  if (!secret.ok()) group::raise_from_store(secret.status().with_context("init_rpc"));
  const store::SignedTexts texts(*secret, found.job, found.world_size);
  auto all = texts.all_gather(*found.store, "workers", found.rank,
                              introduce(request.name, request.options),
                              time_left(steady_clock(), deadline));
  if (!all.ok())
    group::raise_from_store(
        all.status().with_context("init_rpc: '" + request.name + "' waits for the other workers"));
  std::vector<Introduction> workers;
  std::vector<std::string> names;
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    workers.push_back(read_introduction((*all)[rank], static_cast<int>(rank)));
    names.push_back(workers.back().name);
  }
  check_maps(workers);
  auto options = agent_options(request.options);
  for (const auto& worker : workers) {
    if (const auto map = worker.device_maps.find(request.name); map != worker.device_maps.end())
      options.maps_of_callers[worker.name] = map->second;
  }

  options.meeting_place = found.store;
  transport::JobFabricOptions fabric;
  fabric.role = Handshake::Role::rpc;
  fabric.timeout = request.join_timeout;
  fabric.deadline = deadline;
  fabric.shared_memory = request.options.shared_memory;
  fabric.ring_bytes = kRingBytes;
  auto joined = transport::join_fabric(found, fabric);
  if (!joined.ok())
    group::raise_from_store(joined.status().with_context("init_rpc of '" + request.name + "'"));
  return Agent::create(std::move(joined).value(), names, std::move(options));
}

std::shared_ptr<Agent> init_native(const BackendRequest& request) {
  // One deadline for all steps.
  const auto deadline = deadline_after(steady_clock(), request.join_timeout);
  store::RendezvousOptions where;
  where.init_method = request.options.init_method;
  where.rank = request.rank;
  where.world_size = request.world_size;
  where.group_name = "rpc";  // a process group of the same job may use the same address
  where.timeout = request.join_timeout;
  const auto found =
      request.store ? store::rendezvous_over(request.store, where) : store::rendezvous(where);
  if (!found.ok())
    group::raise_from_store(found.status().with_context("init_rpc of '" + request.name + "'"));
  try {
    return join_workers(request, *found, deadline);
  } catch (...) {
    store::abandon(found->store, group::status_of_thrown());
    throw;
  }
}

void open(const std::shared_ptr<Agent>& agent) {
  const auto scope = RpcScope::current();
  agent->on(MessageKind::call, function_handler());
  scope->set(agent);
  try {
    for (const auto& extend : extensions()) extend(*agent);
    agent->start();
  } catch (...) {
    scope->set(nullptr);
    agent->stop();
    throw;
  }
}

void check_not_open() {
  if (const auto agent = RpcScope::current()->agent())
    group::invalid("init_rpc was called twice on worker '" + agent->self().name() +
                   "'; call shutdown first");
}

}  // namespace

// ---- scopes

const std::shared_ptr<RpcScope>& RpcScope::current() { return bound ? bound : of_process(); }
RpcScope::Binding::Binding(std::shared_ptr<RpcScope> scope)
    : before_(std::exchange(bound, std::move(scope))) {}
RpcScope::Binding::~Binding() { bound = std::move(before_); }

struct RpcScope::State {
  std::mutex mutex;  // guards the following
  std::shared_ptr<Agent> agent;
  int process = 0;  // process that opened it: a forked child must not close its parent's
};

RpcScope::RpcScope() : state_(std::make_unique<State>()) {}

RpcScope::~RpcScope() {
  if (!state_->agent) return;
  if (state_->process != ::getpid()) {
    // A forked child: threads and connections are the parent's. The memory goes with the process.
    new auto(std::move(state_->agent));
    return;
  }
  state_->agent->stop();
}

std::shared_ptr<Agent> RpcScope::agent() const {
  const std::lock_guard lock(state_->mutex);
  return state_->agent;
}

void RpcScope::set(std::shared_ptr<Agent> agent) {
  const std::lock_guard lock(state_->mutex);
  state_->agent = std::move(agent);
  state_->process = ::getpid();
}

std::shared_ptr<Agent> current_agent(std::string_view caller) {
  auto agent = RpcScope::current()->agent();
  if (!agent)
    group::invalid(std::string(caller) +
                   " was called before init_rpc (or after shutdown); call init_rpc first");
  return agent;
}

// ---- backends

BackendType::BackendType(std::string_view name) : name_(upper(name)) {
  auto& all = backends();
  const std::lock_guard lock(all.mutex);
  if (all.by_name.contains(name_)) return;
  std::string known;
  for (const auto& [each, init] : all.by_name) known += (known.empty() ? "" : ", ") + each;
  group::invalid("there is no RPC backend '" + name_ + "'; there are " + known);
}
const BackendType BackendType::NATIVE("NATIVE");
const BackendType BackendType::TENSORPIPE("TENSORPIPE");

BackendType register_backend(const std::string& name, InitBackend init) {
  {
    auto& all = backends();
    const std::lock_guard lock(all.mutex);
    if (!all.by_name.emplace(upper(name), std::move(init)).second)
      group::invalid("register_backend: there is an RPC backend '" + upper(name) + "' already");
  }
  return BackendType(name);
}

bool backend_registered(const std::string& name) {
  auto& all = backends();
  const std::lock_guard lock(all.mutex);
  return all.by_name.contains(upper(name));
}

std::vector<std::function<void(Agent&)>>& extensions() {
  static auto* all = new std::vector<std::function<void(Agent&)>>{install_extensions};
  return *all;
}

// ---- life

void init_rpc(const std::string& name, const InitRpcOptions& options) {
  check_not_open();
  check_options(options.rpc_backend_options);
  if (options.store && (options.rank < 0 || options.world_size < 1))
    group::invalid("init_rpc: a store needs rank and world_size too; got rank " +
                   std::to_string(options.rank) + " and world_size " +
                   std::to_string(options.world_size));
  const auto backend = options.backend.value_or(BackendType::NATIVE);
  InitBackend init;
  {
    auto& all = backends();
    const std::lock_guard lock(all.mutex);
    init = all.by_name.at(backend.name());
  }
  auto agent = init({name, options.rank, options.world_size, options.rpc_backend_options,
                     options.store, options.join_timeout});
  if (!agent)
    throw DistBackendError(
        "the function that RPC backend '" + backend.name() + "' was registered with made no agent",
        Code::unsupported);
  set_log_rank(agent->self().id());
  open(agent);
}

void init_rpc_on(std::unique_ptr<transport::Fabric> fabric, const std::vector<std::string>& names,
                 const RpcBackendOptions& options) {
  check_not_open();
  check_options(options);
  open(Agent::create(std::move(fabric), names, agent_options(options)));
}

bool is_initialized() { return RpcScope::current()->agent() != nullptr; }

void shutdown(bool graceful, Duration timeout) {
  const auto agent = current_agent("shutdown");
  const auto scope = RpcScope::current();
  struct Leave {
    std::shared_ptr<RpcScope> scope;
    ~Leave() { scope->set(nullptr); }
  } leave{scope};
  if (graceful) {
    agent->shut_down(timeout);
  } else {
    agent->stop();
  }
}

WorkerInfo get_worker_info() { return current_agent("get_worker_info")->self(); }
WorkerInfo get_worker_info(const To& worker) {
  return current_agent("get_worker_info")->worker(worker);
}
DeviceMap get_device_map(const To& worker) {
  const auto agent = current_agent("get_device_map");
  return agent->device_map(agent->worker(worker));
}
std::vector<WorkerInfo> get_worker_infos() {
  const auto agent = current_agent("get_worker_infos");
  return {agent->workers().begin(), agent->workers().end()};
}
Duration get_rpc_timeout() { return current_agent("get_rpc_timeout")->rpc_timeout(); }
void set_rpc_timeout(Duration timeout) {
  if (timeout < Duration::zero())
    group::invalid("set_rpc_timeout: a timeout must not be negative; zero is none");
  current_agent("set_rpc_timeout")->set_rpc_timeout(timeout);
}

// ---- calls

namespace detail {
namespace {

Agent::OutgoingCall call_of(const Agent& agent, const To& to, const std::string& name,
                            const CallOptions& options, PackArguments pack) {
  Agent::OutgoingCall call;
  call.to = agent.worker(to).id();
  call.name = name;
  call.options = options;
  call.fill = std::move(pack);
  return call;
}

}  // namespace

Answer call_and_wait(Agent& agent, const To& to, const std::string& name,
                     const CallOptions& options, PackArguments pack) {
  return agent.call_sync(call_of(agent, to, name, options, std::move(pack)));
}

void call_later(Agent& agent, const To& to, const std::string& name, const CallOptions& options,
                PackArguments pack, Completion completion) {
  agent.call(call_of(agent, to, name, options, std::move(pack)), std::move(completion));
}

}  // namespace detail
}  // namespace muster::rpc
