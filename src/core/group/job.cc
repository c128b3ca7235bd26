// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/job.h"

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/csrc/api/include/torch/version.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/version.h"
#include "core/collective/communicator.h"
#include "core/collective/creation/survivors.h"
#include "core/collective/op.h"
#include "core/group/backends/native.h"
#include "core/group/creation/backend_registry.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/store/factory.h"
#include "core/transport/job_fabric.h"

namespace muster::group {
namespace {

/// Whether the job may use shared memory for CPU tensors.
bool shares_memory(const BackendConfig& config) {
  const auto backend = config.for_device(c10::DeviceType::CPU);
  return !backend || !(*backend == Backend::TCP);
}

std::shared_ptr<transport::Fabric> connect_ranks(const store::Rendezvous& found,
                                                 const transport::JobFabricOptions& options) {
  auto joined = transport::join_fabric(found, options);
  if (joined.status().code() != Code::mismatch) return take(std::move(joined));
  throw DistError(
      "init_process_group: " + joined.status().message() +
          "; give every rank the same backend and the same number of names in MUSTER_SOCKET_IFNAME",
      Code::mismatch, joined.status().ranks());
}

std::vector<int> in_fabric(const Job& job, const std::vector<int>& ranks) {
  std::vector<int> members;
  for (const int rank : ranks) members.push_back(job.fabric_ranks[static_cast<std::size_t>(rank)]);
  return members;
}

collective::CommunicatorOptions communicator_options(const Job& job, const Backend& backend,
                                                     const std::string& name, Duration timeout) {
  collective::CommunicatorOptions options;
  options.name = name;
  options.terms = job.era;
  options.timeout = timeout;
  options.peer_traces = job.peer_traces;
  options.use_region = !(backend == Backend::TCP);
  return options;
}

std::shared_ptr<ProcessGroupBackend> make_registered(
    const Job& job, const RegisteredBackend& backend, const std::string& name,
    const std::vector<int>& ranks, Duration timeout, const CreationOptions& creation) {
  DistributedBackendOptions options;
  options.group_id = name + job.era + creation.terms;
  options.store = std::make_shared<Store>(
      store::make_prefix_store("backend/" + backend.name + "/" + options.group_id, job.store));
  options.group_rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), job.rank) - ranks.begin());
  options.group_size = static_cast<int>(ranks.size());
  options.timeout = timeout;
  options.global_ranks_in_group = ranks;
  auto made = backend.make(options, creation.pg_options);
  if (made == nullptr)
    throw DistBackendError("the function that backend '" + backend.name +
                               "' was registered with made nothing for group " + name,
                           Code::unsupported);
  return made;
}

collective::CommunicatorOptions creation_options(const Job& job, const Backend& backend,
                                                 const std::string& name, Duration timeout,
                                                 const CreationOptions& creation) {
  auto options = communicator_options(job, backend, name, timeout);
  if (creation.deadline) options.timeout = time_left(job.fabric->clock(), *creation.deadline);
  options.terms += creation.terms;
  options.give_up = creation.give_up;
  return options;
}

/// `ranks`: empty on a process that is in no part of a group that is split.
OwnBackendOptions own_options(const Job& job, const OwnBackend& backend, const std::string& name,
                              const std::vector<int>& ranks, Duration timeout,
                              const CreationOptions& creation) {
  OwnBackendOptions options;
  options.fabric = job.fabric;
  options.members = in_fabric(job, ranks);
  options.ranks = ranks;
  options.rank = static_cast<int>(std::ranges::find(ranks, job.rank) - ranks.begin());
  options.timeout = timeout;
  options.communicator = creation_options(job, backend.name, name, timeout, creation);
  options.pg_options = creation.pg_options;
  options.device_id = creation.device_id;
  return options;
}

/// The backend that a proposal is for.
const Backend* proposed(const BackendConfig& config) {
  const auto& entries = config.entries();
  const auto found =
      std::ranges::find_if(entries, [](const auto& entry) { return is_native(entry.second); });
  return found == entries.end() ? nullptr : &found->second;
}

std::shared_ptr<ProcessGroupBackend> make_backend(const Job& job, const Backend& backend,
                                                  const std::string& name,
                                                  const std::vector<int>& ranks, Duration timeout,
                                                  const CreationOptions& creation) {
  if (const auto* registered = registered_backend(backend.name()))
    return make_registered(job, *registered, name, ranks, timeout, creation);
  if (const auto* own = own_backend(backend))
    return own->make(own_options(job, *own, name, ranks, timeout, creation));
  if (!is_native(backend))
    throw DistBackendError("backend '" + std::string(backend) + "' is not in this build of muster",
                           Code::unsupported);
  auto options = creation_options(job, backend, name, timeout, creation);
  auto members = in_fabric(job, ranks);
  auto communicator =
      creation.proposal.channel != 0
          ? collective::Communicator::commit(job.fabric, std::move(members), creation.proposal,
                                             std::move(options))
          : collective::Communicator::create(job.fabric, std::move(members), std::move(options));
  return std::make_shared<NativeBackend>(backend, take(std::move(communicator)), ranks);
}

/// Creates one backend per name in the configuration with `make`.
template <class Make>
void make_backends(ProcessGroupParts& parts, Make make) {
  std::vector<std::pair<Backend, std::shared_ptr<ProcessGroupBackend>>> made;
  for (const auto& [device, backend] : parts.config.entries()) {
    auto at = std::find_if(made.begin(), made.end(),
                           [&name = backend](const auto& entry) { return entry.first == name; });
    if (at == made.end()) at = made.emplace(made.end(), backend, make(backend));
    if (at->second != nullptr) parts.backends.emplace_back(device, at->second);
  }
}

/// Sets a group's job-related parts before its backends are created, because logs and traces of the
/// creation already use its name. `parts.ranks` must be set.
void join_job(ProcessGroupParts& parts, const Job& job, std::string name, Duration timeout) {
  parts.name = std::move(name);
  parts.timeout = timeout;
  parts.store = job.store;
  parts.first_ranks = in_fabric(job, parts.ranks);
  if (parts.rank < 0 || !job.recorder) return;
  parts.recorder = job.recorder;
  parts.recorded_as = job.recorder->add_group(parts.name, parts.first_ranks, parts.rank);
}

/// Null if the group has no such backend.
ProcessGroupBackend* backend_of(const ProcessGroup& group, const Backend& backend) {
  for (const auto& [device, made] : core_of(group).parts().backends)
    if (backend == made->capabilities().name) return made.get();
  return nullptr;
}

/// The trace shows each silence of another rank as a call on a group of its own, from when it was
/// last heard: it ends when the rank answers again, and fails when the rank counts as failed.
class SilenceRecord {
 public:
  /// Silences noted before this are not recorded.
  void open(std::shared_ptr<trace::Recorder> recorder, std::vector<int> ranks, int me) {
    const std::lock_guard lock(mutex_);
    recorder_ = std::move(recorder);
    ranks_ = std::move(ranks);
    me_ = me;
  }
  void note(const transport::Silence& silence) {
    using Step = transport::Silence::Step;
    const std::lock_guard lock(mutex_);
    auto found = under_way_.find(silence.rank);
    if (!recorder_ || (silence.step == Step::over && found == under_way_.end())) return;
    if (found == under_way_.end()) {
      if (!group_) group_ = recorder_->add_group("heartbeats", ranks_, me_);
      const trace::RecordedCall call{.name = "silence", .peer = silence.rank};
      found =
          under_way_.emplace(silence.rank, recorder_->begin(*group_, call, silence.since)).first;
    }
    if (silence.step == Step::suspected) return;
    const TimePoint now = steady_clock().now();
    if (silence.step == Step::over) {
      recorder_->end(found->second, now);
    } else {
      recorder_->fail(found->second,
                      "rank " + std::to_string(silence.rank) + " has not answered for " +
                          describe(now - silence.since) + " and counts as failed",
                      now);
    }
    under_way_.erase(found);
  }

 private:
  std::mutex mutex_;  // taken under the fabric's lock; nothing else is taken under it
  std::shared_ptr<trace::Recorder> recorder_;
  std::vector<int> ranks_;
  int me_ = 0;
  std::optional<std::uint16_t> group_;  // made by the first silence
  std::map<int, trace::Ticket> under_way_;
};

/// Starts recording this rank's calls and serving requests for them.
void keep_record(Job& job) {
  job.recorder = take(trace::Recorder::from_environment(job.name, job.rank, job.world_size));
  if (!job.recorder) return;
  const auto hosts = job.fabric->hosts();
  std::vector<int> elsewhere;
  for (int rank = 0; rank < job.world_size; ++rank) {
    if (hosts[static_cast<std::size_t>(rank)] != hosts[static_cast<std::size_t>(job.rank)])
      elsewhere.push_back(rank);
  }
  job.peer_traces =
      std::make_shared<trace::PeerTraces>(job.recorder, job.store, std::move(elsewhere));
  job.responder = trace::TraceResponder::start(job.recorder, job.store,
                                               [fabric = std::weak_ptr(job.fabric)](bool links) {
                                                 trace::RankReport report;
                                                 const auto alive = fabric.lock();
                                                 if (!alive) return report;
                                                 report.refusals = alive->refusals();
                                                 if (links) report.links = alive->link_figures();
                                                 return report;
                                               });
  if (logs(LogLevel::warning))
    job.long_waits = std::make_shared<trace::LongWaits>(job.recorder, job.peer_traces, job.rank);
}

constexpr std::size_t kRanksShown = 16;

std::string shown(const std::vector<int>& ranks) {
  if (ranks.size() <= kRanksShown) return list(ranks);
  const auto first = std::vector<int>(ranks.begin(), ranks.begin() + kRanksShown);
  return std::to_string(ranks.size()) + " ranks, the first " + list(first);
}

void log_job(const Job& job, const BackendConfig& config, Duration timeout, Duration took) {
  if (!logs(LogLevel::info)) return;
  const auto hosts = job.fabric->hosts();
  const int count = *std::max_element(hosts.begin(), hosts.end()) + 1;
  log(LogLevel::info, "muster " + std::string(version()) + " with torch " TORCH_VERSION ": rank " +
                          std::to_string(job.rank) + " of " + std::to_string(job.world_size) +
                          " of job " + job.name + " on " + std::to_string(count) +
                          (count == 1 ? " host" : " hosts") + ", process " +
                          std::to_string(::getpid()) + ", backend " + config.text() + ", timeout " +
                          describe(timeout) + "; connected in " + describe(took) +
                          (job.recorder ? "; trace in " + job.recorder->directory() : ""));
}

/// Logs that `group` was created, starting at `begin`.
void log_group(const ProcessGroup& group, TimePoint begin) {
  if (!logs(LogLevel::info) || !group.is_member()) return;
  log(LogLevel::info,
      "group " + group.name() + " of ranks " + shown(group.ranks()) + ": this is its rank " +
          std::to_string(group.rank()) + ", backend " + group.backend() + " over " +
          (core_of(group).shares_memory() ? "shared memory" : "links") + ", timeout " +
          describe(group.timeout()) + "; made in " + describe(steady_clock().now() - begin));
}

}  // namespace

std::shared_ptr<Job> open_job(store::Rendezvous found, const BackendConfig& config,
                              Duration timeout, TimePoint deadline,
                              std::optional<Duration> heartbeat_timeout) {
  const auto begin = steady_clock().now();
  set_log_rank(found.rank);
  transport::JobFabricOptions fabric;
  fabric.terms = "backend '" + config.text() + "' and " + std::to_string(fabric.interfaces.size()) +
                 " network interfaces";
  fabric.shared_memory = shares_memory(config);
  fabric.timeout = timeout;
  fabric.deadline = deadline;
  fabric.rules = &collective::fingerprint_rules();
  fabric.heartbeat_limit = heartbeat_timeout;
  const auto silences = std::make_shared<SilenceRecord>();
  fabric.on_silence = [silences](const transport::Silence& silence) { silences->note(silence); };

  auto job = std::make_shared<Job>();
  job->rank = found.rank;
  job->world_size = found.world_size;
  job->name = found.job;
  job->creation_deadlocks = std::make_shared<CreationDeadlockDetector>(found.world_size);
  job->fabric_ranks.resize(static_cast<std::size_t>(found.world_size));
  std::iota(job->fabric_ranks.begin(), job->fabric_ranks.end(), 0);
  job->fabric = connect_ranks(found, fabric);
  job->store = std::move(found.store);
  keep_record(*job);
  silences->open(job->recorder, job->fabric_ranks, job->rank);
  log_job(*job, config, timeout, steady_clock().now() - begin);
  return job;
}

Group make_group(const std::shared_ptr<Job>& job, std::string name, std::vector<int> ranks,
                 BackendConfig config, Duration timeout, CreationOptions creation) {
  const auto begin = steady_clock().now();
  ProcessGroupParts parts;
  parts.config = std::move(config);
  parts.ranks = std::move(ranks);
  const auto me = std::find(parts.ranks.begin(), parts.ranks.end(), job->rank);
  if (me != parts.ranks.end()) parts.rank = static_cast<int>(me - parts.ranks.begin());
  join_job(parts, *job, std::move(name), timeout);
  if (parts.rank >= 0)
    make_backends(parts, [&](const Backend& backend) -> std::shared_ptr<ProcessGroupBackend> {
      const auto* library = own_backend(backend);
      auto made =
          creation.grows && library != nullptr && library->grow
              ? library->grow(
                    creation.grown_from ? backend_of(*creation.grown_from, backend) : nullptr,
                    own_options(*job, *library, parts.name, parts.ranks, timeout, creation))
              : make_backend(*job, backend, parts.name, parts.ranks, timeout, creation);
      if (is_native(backend)) creation.proposal = {};  // a proposal is good for one group
      return made;
    });
  auto made = std::make_shared<GroupCore>(std::move(parts));
  log_group(*made, begin);
  return made;
}

Group make_default_group(const std::shared_ptr<Job>& job, const std::string& name,
                         BackendConfig config, Duration timeout, const CreationOptions& creation) {
  std::vector<int> ranks(static_cast<std::size_t>(job->world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  try {
    return make_group(job, name, std::move(ranks), std::move(config), timeout, creation);
  } catch (...) {
    const Status why = status_of_thrown();
    job->fabric->fail_rank(why.message(), why.ranks());
    throw;
  }
}

collective::GroupProposal propose_group(const Job& job, const std::vector<int>& ranks,
                                        const BackendConfig& config) {
  const auto* backend = proposed(config);
  if (backend == nullptr) return {};
  return collective::Communicator::propose(*job.fabric, in_fabric(job, ranks),
                                           communicator_options(job, *backend, {}, {}));
}

collective::GroupProposal settle_proposals(const Job& job, const std::vector<int>& ranks,
                                           std::span<const collective::GroupProposal> proposals) {
  return collective::Communicator::settle(*job.fabric, in_fabric(job, ranks), proposals);
}

std::string name_of(const Job& job, const std::vector<int>& ranks) {
  return list(ranks) + (job.era.empty() ? "" : " of default shrunk");
}

Group split_group(const std::shared_ptr<Job>& job, const ProcessGroup& parent,
                  const std::vector<std::vector<int>>& parts, int own, std::string name,
                  BackendConfig config, Duration timeout, const CreationOptions& creation) {
  const auto begin = steady_clock().now();
  ProcessGroupParts made;
  if (own >= 0) {
    const auto& positions = parts[static_cast<std::size_t>(own)];
    for (const int position : positions) made.ranks.push_back(parent.global_rank_of(position));
    made.rank = static_cast<int>(std::find(positions.begin(), positions.end(), parent.rank()) -
                                 positions.begin());
  }
  made.config = std::move(config);
  join_job(made, *job, std::move(name), timeout);
  make_backends(made, [&](const Backend& backend) -> std::shared_ptr<ProcessGroupBackend> {
    auto* const from = backend_of(parent, backend);
    const auto* library = own_backend(backend);
    if (from != nullptr && library != nullptr && library->split)
      return library->split(*from, own,
                            own_options(*job, *library, made.name, made.ranks, timeout, creation));
    const auto* native = is_native(backend) ? dynamic_cast<NativeBackend*>(from) : nullptr;
    if (native == nullptr)
      return own < 0 ? nullptr
                     : make_backend(*job, backend, made.name, made.ranks, timeout, creation);
    auto options = communicator_options(*job, backend, made.name, timeout);
    if (creation.deadline) options.timeout = time_left(job->fabric->clock(), *creation.deadline);
    auto communicator =
        take(collective::Communicator::split(native->communicator(), parts, std::move(options)));
    if (communicator == nullptr) return nullptr;
    return std::make_shared<NativeBackend>(backend, std::move(communicator), made.ranks);
  });
  if (own < 0) return nullptr;
  auto group = std::make_shared<GroupCore>(std::move(made));
  log_group(*group, begin);
  return group;
}

ShrunkGroup shrink_group(const std::shared_ptr<Job>& job, const ProcessGroup& old,
                         const std::vector<int>& exclude, bool is_default_group, Duration timeout,
                         std::shared_ptr<ProcessGroupOptions> pg_options) {
  const auto begin = steady_clock().now();
  const auto deadline = deadline_after(job->fabric->clock(), timeout);
  const auto& before = core_of(old).parts();
  collective::Lineage lineage;
  if (before.lineage) {
    lineage = *before.lineage;
  } else {
    lineage.name = old.name() + job->era;
    lineage.members = in_fabric(*job, old.ranks());
  }
  std::vector<int> left_out;
  for (const int position : exclude)
    left_out.push_back(in_fabric(*job, {old.global_rank_of(position)}).front());
  // Equal on all survivors, however often each of them has shrunk the group: they meet by this
  // name.
  const auto name = before.lineage ? old.name() : old.name() + " shrunk";
  const auto& first = before.config.entries().front().second;
  auto options = communicator_options(*job, first, name, timeout);
  auto shrunk = take(collective::shrink(job->fabric, std::move(lineage), left_out, options));

  const auto members = shrunk.communicator->members();
  auto now = job;
  if (is_default_group) {
    now = std::make_shared<Job>(*job);
    now->fabric_ranks.assign(members.begin(), members.end());
    now->world_size = static_cast<int>(members.size());
    now->rank = shrunk.communicator->rank();
    now->era = ", after attempt " + std::to_string(shrunk.lineage.attempts) +
               " to shrink the default group";
  }
  ProcessGroupParts parts;
  for (const int member : members)
    parts.ranks.push_back(
        static_cast<int>(std::find(now->fabric_ranks.begin(), now->fabric_ranks.end(), member) -
                         now->fabric_ranks.begin()));
  std::vector<int> lost;  // ranks of the old group
  for (int rank = 0; rank < old.size(); ++rank)
    if (std::ranges::find(members, in_fabric(*job, {old.global_rank_of(rank)}).front()) ==
        members.end())
      lost.push_back(rank);
  parts.rank = shrunk.communicator->rank();
  parts.config = before.config;
  join_job(parts, *now, name, timeout);
  parts.lineage = std::make_shared<const collective::Lineage>(shrunk.lineage);
  const CreationOptions creation{
      "attempt " + std::to_string(shrunk.lineage.attempts), {}, std::move(pg_options), deadline};
  make_backends(parts, [&](const Backend& backend) -> std::shared_ptr<ProcessGroupBackend> {
    if (backend == first && is_native(backend))
      return std::make_shared<NativeBackend>(backend, shrunk.communicator, parts.ranks);
    auto* const from = backend_of(old, backend);
    const auto* library = own_backend(backend);
    if (from != nullptr && library != nullptr && library->shrink)
      return library->shrink(*from, lost,
                             own_options(*now, *library, name, parts.ranks, timeout, creation));
    return make_backend(*now, backend, name, parts.ranks, timeout, creation);
  });
  auto group = std::make_shared<GroupCore>(std::move(parts));
  log_group(*group, begin);
  return {std::move(group), std::move(now)};
}

int host_of(const Job& job, int rank) {
  return job.fabric
      ->hosts()[static_cast<std::size_t>(job.fabric_ranks[static_cast<std::size_t>(rank)])];
}

}  // namespace muster::group
