// SPDX-License-Identifier: BSD-3-Clause
#include "muster/init.h"
#include "core/group/epoch.h"
#include "core/group/world.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "core/base/environment.h"
#include "core/base/process/launcher_socket.h"
#include "core/group/call/exchange.h"
#include "core/group/creation/backend_registry.h"
#include "core/group/creation/group_creation.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/memory/shared_allocator.h"
#include "core/group/resolve.h"
#include "core/rendezvous/rendezvous.h"
#include "core/transport/fabric.h"
#include "core/transport/failure/process_failure.h"

namespace muster {
namespace {

using group::check_available;
using group::group_or_default;
using group::list;

void check_options(const InitProcessGroupOptions& options) {
  const auto fail = [](const std::string& text) { group::invalid("init_process_group: " + text); };
  if (options.store && options.init_method)
    fail("store and init_method exclude each other; give one of them");
  if (options.store && (options.rank < 0 || options.world_size < 1))
    fail("store needs rank and world_size too; got rank " + std::to_string(options.rank) +
         " and world_size " + std::to_string(options.world_size));
  if (options.world_size == 0 || options.world_size < -1)
    fail("world_size " + std::to_string(options.world_size) + " is not a number of ranks");
  if (options.heartbeat_timeout.value_or(Duration::zero()) < Duration::zero())
    fail("heartbeat_timeout is negative; 0 waits for silent ranks for ever");
  if (options.rank < -1 || (options.world_size > 0 && options.rank >= options.world_size))
    fail("rank " + std::to_string(options.rank) + " is not in 0 to world_size - 1" +
         (options.world_size > 0 ? " = " + std::to_string(options.world_size - 1) : ""));
}

/// The backend whose own launcher tells ranks and sizes, because no other source gives them; null
/// if there is none.
const group::OwnBackend* backend_that_knows_job(const InitProcessGroupOptions& options,
                                                const BackendConfig& config) {
  if (options.store || options.init_method || options.rank >= 0 || options.world_size >= 0 ||
      env_text("RANK") || env_text("MASTER_ADDR"))
    return nullptr;
  for (const auto& entry : config.entries()) {
    const auto* own = group::own_backend(entry.second);
    if (own != nullptr && own->own_job) return own;
  }
  return nullptr;
}

store::Rendezvous find_job(const InitProcessGroupOptions& options, const BackendConfig& config,
                           const group::SpawnedRank& spawned_rank, TimePoint deadline,
                           const group::EpochPlace& epoch) {
  store::RendezvousOptions rendezvous;
  rendezvous.init_method = options.init_method.value_or("env://");
  rendezvous.rank = options.rank;
  rendezvous.world_size = options.world_size;
  rendezvous.group_name = options.group_name;
  rendezvous.timeout = time_left(steady_clock(), deadline);
  rendezvous.epoch = epoch.number;
  rendezvous.agent_store = epoch.agent_store;
  auto store = options.store ? options.store->engine() : nullptr;
  if (spawned_rank.store && !store && !options.init_method && options.rank < 0 &&
      options.world_size < 0) {
    store = spawned_rank.store;
    rendezvous.rank = spawned_rank.rank;
    rendezvous.world_size = spawned_rank.world_size;
  }
  const auto* knows_job = backend_that_knows_job(options, config);
  auto found = store                  ? store::rendezvous_over(std::move(store), rendezvous)
               : knows_job != nullptr ? knows_job->own_job(rendezvous)
                                      : store::rendezvous(rendezvous);
  if (!found.ok()) group::raise_from_store(found.status().with_context("init_process_group"));
  return std::move(found).value();
}

std::vector<int> all_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<int> checked_ranks(const NewGroupOptions& options, int world_size) {
  const auto given = options.ranks.value_or(all_ranks(world_size));
  auto ranks = given;
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty()) group::invalid("new_group: ranks is empty; leave it out for all ranks");
  if (ranks.front() < 0 || ranks.back() >= world_size)
    group::invalid("new_group: ranks " + list(ranks) + " are not all in 0 to " +
                   std::to_string(world_size - 1) + ", the ranks of the default group");
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end())
    group::invalid("new_group: ranks " + list(ranks) + " names a rank twice");
  return options.sort_ranks ? ranks : given;
}

/// Whether `ranks` is a non-empty subset of `others`.
bool is_subset(std::span<const int> ranks, const std::vector<int>& others) {
  return !ranks.empty() && std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return std::find(others.begin(), others.end(), rank) != others.end();
  });
}

/// Checks that all ranks make this call, and returns what the members have proposed in the same
/// round, settled.
collective::GroupProposal agree_on_call(const Group& world, const group::Job& job,
                                        const std::vector<int>& ranks, const BackendConfig& config,
                                        const std::string& call, TimePoint deadline,
                                        const std::function<Status()>& give_up) {
  static_assert(sizeof(collective::GroupProposal) == sizeof(group::CallNote));
  const auto mine = group::propose_group(job, ranks, config);
  try {
    const auto notes =
        group::compare_calls(world, call, deadline, give_up, std::bit_cast<group::CallNote>(mine));
    std::vector<collective::GroupProposal> proposals;
    for (const int rank : ranks)
      proposals.push_back(
          std::bit_cast<collective::GroupProposal>(notes[static_cast<std::size_t>(rank)]));
    return group::settle_proposals(job, ranks, proposals);
  } catch (const DistError&) {
    // If the calls differ, every rank sees that. If the default group has failed, another rank may
    // have completed the round and commit.
    if (world->failure().ok()) collective::Communicator::cancel(*job.fabric, mine);
    throw;
  }
}

std::atomic<std::int64_t>& joined_epoch() {
  static std::atomic<std::int64_t> number{0};
  return number;
}

}  // namespace

void init_process_group(const InitProcessGroupOptions& options) {
  group::init_at_epoch(options, {});
}

void group::init_at_epoch(const InitProcessGroupOptions& options, const EpochPlace& epoch) {
  keep_launcher_socket_from_programs();
  const auto scope = World::hold_current();
  if (scope->initialized())
    group::invalid("init_process_group was called twice on rank " +
                   std::to_string(scope->world("init_process_group")->rank()) +
                   ": there is a default group already; call destroy_process_group first");
  check_options(options);
  auto config = BackendConfig::parse(options.backend);
  check_available(config);
  check_pg_options(options.pg_options.get(), config, "init_process_group");
  group::share_memory_if_asked(options.share_memory);
  const auto timeout = options.timeout.value_or(config.default_timeout());
  const auto deadline = deadline_after(
      steady_clock(), timeout);  // for everything: each stage gets the remaining time

  auto found = find_job(options, config, scope->spawned_rank(), deadline, epoch);
  const auto store = found.store;
  std::shared_ptr<Job> job;
  Group world;
  try {
    job = open_job(std::move(found), config, timeout, deadline, options.heartbeat_timeout);
    world = make_default_group(
        job, "default", std::move(config), timeout,
        {.pg_options = options.pg_options, .deadline = deadline, .device_id = options.device_id});
  } catch (...) {
    store::abandon(store, status_of_thrown());
    throw;
  }
  scope->open(std::move(job), std::move(world));
  if (epoch.number > 0) joined_epoch() = epoch.number;
}

std::int64_t group::current_epoch() {
  if (const std::int64_t joined = joined_epoch()) return joined;
  const auto told = env_integer("MUSTER_EPOCH", 0, std::numeric_limits<std::int64_t>::max());
  return told.ok() ? told->value_or(0) : 0;
}

void destroy_process_group(const Group& group) {
  if (group && !group->is_member()) return;
  auto closing = World::current().remove(group, "destroy_process_group");
  Status first;
  bool never_failed = true;  // no group of the job ever failed here
  // Ranks whose failure this process has already been shown. One death ends all groups with that
  // rank.
  std::vector<int> reported_ranks;
  for (const auto& closed : closing.groups) {
    if (!closed->is_member() || closed->failure().ok() || !core_of(closed).failure_was_shown())
      continue;
    const auto failure = closed->failure();
    reported_ranks.insert(reported_ranks.end(), failure.ranks().begin(), failure.ranks().end());
  }
  if (closing.job && closing.job->peer_traces) closing.job->peer_traces->stop();
  if (closing.job && closing.job->responder) closing.job->responder->stop();
  for (auto& closed : closing.groups) {
    // If rank 0 serves the store, the server must be gone before any rank returns, so that the
    // address can be reused immediately. Rank 0 releases it before the default group, the last to
    // close, synchronises all ranks.
    if (closing.job && closed == closing.groups.back() && closing.job->rank == 0)
      closing.job->store.reset();
    if (!closed->is_member()) continue;
    const auto known = closed->failure();
    never_failed = never_failed && known.ok();
    const bool seen = !known.ok() && (core_of(closed).failure_was_shown() ||
                                      is_subset(known.ranks(), reported_ranks));
    auto status = core_of(closed).close();
    if (!seen && first.ok()) first = known.ok() ? std::move(status) : known;
    closed.reset();
  }
  if (closing.job && closing.job->recorder && never_failed && first.ok())
    closing.job->recorder->remove();
  if (closing.job && closing.job->fabric) closing.job->fabric->leave();
  closing.job.reset();
  if (!first.ok()) group::raise(first.with_context("destroy_process_group"));
}

void note_failure(const std::string& why) { transport::note_process_failure(why); }

bool is_initialized() { return World::current().initialized(); }
Group default_group() { return World::current().world("default_group"); }

int get_rank(const Group& group) { return group_or_default(group, "get_rank")->rank(); }
int get_world_size(const Group& group) { return group_or_default(group, "get_world_size")->size(); }

std::string get_backend(const Group& group) {
  const auto which = group_or_default(group, "get_backend");
  if (!which->is_member())
    group::invalid("get_backend: this process is not a member of group " + which->name());
  return which->backend();
}

Group new_group(const NewGroupOptions& options) {
  const auto scope = World::hold_current();
  const auto world = scope->world("new_group");
  const auto job = scope->job("new_group");
  auto ranks = checked_ranks(options, job->world_size);
  auto config =
      options.backend ? BackendConfig::parse(options.backend) : core_of(world).parts().config;
  check_available(config);
  check_pg_options(options.pg_options.get(), config, "new_group");
  const auto timeout = options.timeout.value_or(config.default_timeout());
  const auto deadline = deadline_after(steady_clock(), timeout);

  const auto call = "new_group(ranks=" + list(ranks) + ", backend=" + config.text() +
                    ", timeout=" + describe(timeout) +
                    (options.use_local_synchronization ? ", use_local_synchronization)" : ")");
  collective::GroupProposal proposal;
  if (options.use_local_synchronization) {
    if (std::find(ranks.begin(), ranks.end(), job->rank) == ranks.end())
      return group::make_group(job, group::name_of(*job, ranks), ranks, std::move(config), timeout);
  } else {
    // Another rank may be waiting for this one in a creation that only its members know of.
    auto creation = job->creation_deadlocks->begin(
        job->store, {job->rank, scope->unique_name("new_group of all ranks") + job->era, call,
                     all_ranks(job->world_size), true});
    try {
      proposal = agree_on_call(world, *job, ranks, config, call, deadline,
                               [&] { return creation.poll(); });
    } catch (const DistError& error) {
      // The rank that found this creation stuck may already be in another call of the default
      // group; this rank then sees only that mismatch.
      if (error.code() == Code::mismatch) group::check(creation.verdict());
      throw;
    }
  }
  return group::create_group(*scope, job,
                             {.call = call,
                              .ranks = std::move(ranks),
                              .config = std::move(config),
                              .timeout = timeout,
                              .members_only = options.use_local_synchronization},
                             {.pg_options = options.pg_options,
                              .deadline = deadline,
                              .proposal = proposal,
                              .device_id = options.device_id});
}

int get_group_rank(const Group& group, int global_rank) {
  return group_or_default(group, "get_group_rank")->group_rank_of(global_rank);
}
int get_global_rank(const Group& group, int group_rank) {
  return group_or_default(group, "get_global_rank")->global_rank_of(group_rank);
}
std::vector<int> get_process_group_ranks(const Group& group) {
  return group_or_default(group, "get_process_group_ranks")->ranks();
}

}  // namespace muster
