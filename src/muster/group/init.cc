#include "muster/group/init.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "muster/base/log.h"
#include "muster/base/secret.h"
#include "muster/group/errors.h"
#include "muster/group/exchange.h"
#include "muster/group/job.h"
#include "muster/group/rank_list.h"
#include "muster/group/world.h"
#include "muster/store/factory.h"
#include "muster/store/rendezvous.h"

namespace muster {
namespace {

using group::list;

constexpr Duration kTimeout = std::chrono::minutes(30);
constexpr Duration kTimeoutNccl = std::chrono::minutes(10);

Duration default_timeout(const BackendConfig& config) {
  const auto& entries = config.entries();
  const bool nccl = std::all_of(entries.begin(), entries.end(), [](const auto& entry) { return entry.second == Backend::NCCL; });
  return nccl ? kTimeoutNccl : kTimeout;
}

void check_available(const BackendConfig& config) {
  for (const auto& [device, backend] : config.entries()) {
    if (backend.is_available()) continue;
    std::string have;
    for (const auto& name : Backend::known())
      if (Backend(name).is_available()) have += (have.empty() ? "" : ", ") + name;
    throw DistBackendError("backend '" + std::string(backend) + "' is not in this build of muster, which has " + have, Code::unsupported);
  }
}

void check_options(const InitProcessGroupOptions& options) {
  const auto say = [](const std::string& text) { group::invalid("init_process_group: " + text); };
  if (options.store && options.init_method) say("store and init_method exclude each other; give one of them");
  if (options.store && (options.rank < 0 || options.world_size < 1))
    say("store needs rank and world_size too; got rank " + std::to_string(options.rank) + " and world_size " +
        std::to_string(options.world_size));
  if (options.world_size == 0 || options.world_size < -1)
    say("world_size " + std::to_string(options.world_size) + " is not a number of ranks");
  if (options.rank < -1 || (options.world_size > 0 && options.rank >= options.world_size))
    say("rank " + std::to_string(options.rank) + " is not in 0 to world_size - 1" +
        (options.world_size > 0 ? " = " + std::to_string(options.world_size - 1) : ""));
}

store::Rendezvous find_job(const InitProcessGroupOptions& options, Duration timeout) {
  if (options.store) {
    store::Rendezvous found;
    found.store = store::make_prefix_store("muster/" + options.group_name, options.store->engine());
    found.rank = options.rank;
    found.world_size = options.world_size;
    return found;
  }
  store::RendezvousOptions rendezvous;
  rendezvous.init_method = options.init_method.value_or("env://");
  rendezvous.rank = options.rank;
  rendezvous.world_size = options.world_size;
  rendezvous.group_name = options.group_name;
  rendezvous.timeout = timeout;
  auto found = store::rendezvous(rendezvous);
  if (!found.ok()) group::raise_from_store(found.status().with_context("init_process_group"));
  return std::move(found).value();
}

/// A store may outlive a job: the n-th job on it has keys of its own. All its ranks agree on n because each has come n times.
void keep_from_earlier_jobs(store::Rendezvous& found) {
  const auto generation = found.store->add("generation/" + std::to_string(found.rank), 1);
  if (!generation.ok()) group::raise_from_store(generation.status().with_context("init_process_group"));
  found.store = store::make_prefix_store("job" + std::to_string(*generation), found.store);
  const auto name = found.store->compare_set("name", "", found.job + "/" + Secret::random_text().substr(0, 16));
  if (!name.ok()) group::raise_from_store(name.status().with_context("init_process_group"));
  found.job = *name;
}

std::vector<int> all_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<int> checked_ranks(const NewGroupOptions& options, int world_size) {
  auto ranks = options.ranks.value_or(all_ranks(world_size));
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty()) group::invalid("new_group: ranks is empty; leave it out for all ranks");
  if (ranks.front() < 0 || ranks.back() >= world_size)
    group::invalid("new_group: ranks " + list(ranks) + " are not all in 0 to " + std::to_string(world_size - 1) +
                   ", the ranks of the default group");
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end())
    group::invalid("new_group: ranks " + list(ranks) + " names a rank twice");
  return ranks;
}

Group named(const Group& group, std::string_view caller) { return group ? group : WorldScope::current()->world(caller); }

}  // namespace

void init_process_group(const InitProcessGroupOptions& options) {
  const auto scope = WorldScope::current();
  if (scope->initialized())
    group::invalid("init_process_group was called twice: there is a default group already; call destroy_process_group first");
  check_options(options);
  auto config = BackendConfig::parse(options.backend);
  check_available(config);
  const auto timeout = options.timeout.value_or(default_timeout(config));

  auto found = find_job(options, timeout);
  keep_from_earlier_jobs(found);
  auto job = group::open_job(std::move(found), config, timeout);
  set_log_rank(job->rank);
  auto world = group::make_group(job, "default", all_ranks(job->world_size), std::move(config), timeout, {{}, {}, options.pg_options});
  scope->open(std::move(job), std::move(world));
}

void destroy_process_group(const Group& group) {
  if (group && !group->is_member()) return;
  auto closing = WorldScope::current()->remove(group, "destroy_process_group");
  Status first;
  for (auto& closed : closing.groups) {
    // Where rank 0 serves the store, that server must be gone before any rank returns, so that the address can be used again at once: rank
    // 0 lets it go before the default group, the last to close, brings all ranks together.
    if (closing.job && closed == closing.groups.back() && closing.job->rank == 0) closing.job->store.reset();
    if (!closed->is_member()) continue;
    const auto known = closed->failure();
    if (auto status = closed->close(); known.ok() && first.ok()) first = status;
    closed.reset();
  }
  closing.job.reset();
  if (!first.ok()) group::raise(first.with_context("destroy_process_group"));
}

bool is_initialized() { return WorldScope::current()->initialized(); }
Group default_group() { return WorldScope::current()->world("default_group"); }

int get_rank(const Group& group) { return named(group, "get_rank")->rank(); }
int get_world_size(const Group& group) { return named(group, "get_world_size")->size(); }

std::string get_backend(const Group& group) {
  const auto which = named(group, "get_backend");
  if (!which->is_member()) group::invalid("get_backend: this process is not a member of group " + which->name());
  return which->backend();
}

Group new_group(const NewGroupOptions& options) {
  const auto scope = WorldScope::current();
  const auto world = scope->world("new_group");
  const auto job = scope->job("new_group");
  auto ranks = checked_ranks(options, job->world_size);
  auto config = BackendConfig::parse(options.backend.value_or(world->backend()));
  check_available(config);
  const auto timeout = options.timeout.value_or(default_timeout(config));

  const auto call = "new_group(ranks=" + list(ranks) + ", backend=" + config.text() + ", timeout=" + describe(timeout) +
                    (options.use_local_synchronization ? ", use_local_synchronization)" : ")");
  if (options.use_local_synchronization) {
    if (std::find(ranks.begin(), ranks.end(), job->rank) == ranks.end())
      return group::make_group(job, list(ranks), std::move(ranks), std::move(config), timeout);
  } else {
    group::compare_calls(world, call);
  }
  auto name = scope->unique_name(list(ranks));
  // Nobody else knows of a making that only the members call: whether it can ever end is for them to find out.
  auto making = job->order->begin(options.use_local_synchronization ? job->store : nullptr, job->rank, name + job->era, call, ranks);
  auto group = group::make_group(job, std::move(name), std::move(ranks), std::move(config), timeout,
                                 {options.use_local_synchronization ? call : "", [&] { return making.look(); }, options.pg_options});
  if (group->is_member()) scope->add(group);
  return group;
}

int get_group_rank(const Group& group, int global_rank) { return named(group, "get_group_rank")->group_rank_of(global_rank); }
int get_global_rank(const Group& group, int group_rank) { return named(group, "get_global_rank")->global_rank_of(group_rank); }
std::vector<int> get_process_group_ranks(const Group& group) { return named(group, "get_process_group_ranks")->ranks(); }

}  // namespace muster
