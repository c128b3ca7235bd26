// SPDX-License-Identifier: BSD-3-Clause
/// The launcher's options and the parsers of their values.
#pragma once

#include <signal.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/rendezvous/scheduler.h"
#include "jobs/membership/next_epoch.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::launch {

class NodeNumbers;
struct JoinOffer;

/// A set of a worker's streams; the numbers are torchrun's.
enum class Streams : std::uint8_t { none = 0, out = 1, err = 2, both = 3 };
inline bool covers(Streams streams, Streams one) {
  return (static_cast<unsigned>(streams) & static_cast<unsigned>(one)) != 0;
}

/// Whether a list has standard error for the worker.
inline bool keeps_errors(const std::vector<Streams>& list, std::size_t local_rank) {
  return local_rank < list.size() && covers(list[local_rank], Streams::err);
}

/// `static`, `c10d`, `etcd`, `kubernetes`.
enum class RendezvousKind : std::uint8_t { static_ranks, assigned_ranks, etcd, kubernetes };

enum class LocalRankArgument : std::uint8_t {
  none,
  dash,
  underscore
};  ///< what is put before the program's own arguments

enum class OnLostState : std::uint8_t {
  begin_again,  ///< training begins with what the program loads itself
  fail,         ///< the job ends with exit code 1
};

/// The hardware threads of a worker.
struct WorkerCpus {
  std::vector<int> threads;  ///< hardware threads by the system's numbers, ascending
  int cores = 1;             ///< that are its own, or its share of them: OMP_NUM_THREADS
};

struct RunOptions {
  std::string command = "muster run";  ///< the command's name in messages

  // The job.
  bool standalone = false;
  int nodes = 1;
  /// With fewer than `nodes` the job goes on: nodes may join and leave while it runs. 0: all.
  int min_nodes = 0;
  int workers = 1;               ///< on this node
  std::optional<int> node_rank;  ///< absent: 0 with one node, else assigned by the rendezvous
  RendezvousKind rendezvous = RendezvousKind::static_ranks;
  std::optional<std::string> master_addr;
  std::optional<std::uint16_t> master_port;
  /// host[:port] of the rendezvous; with `etcd` one or more of its members, separated by commas;
  /// with `kubernetes` the API server, and absent that of the pod.
  std::optional<std::string> endpoint;
  std::optional<std::string> local_addr;  ///< the address of this node for other nodes
  std::optional<std::string> run_id;
  std::string role = "default";
  Duration join_timeout = std::chrono::seconds(600);  ///< for all nodes to join
  /// How long a job that has lost a node waits for another before it goes on with fewer.
  Duration repair_timeout{0};
  Duration last_call =
      std::chrono::seconds(30);  ///< how long the first epoch waits for more than `min_nodes`
  /// A node that has been silent for this long counts as dead (the end of its launcher is noticed
  /// at once). Absent: 2.5 s if the job can go on without it, 20 s if its loss ends the job.
  std::optional<Duration> node_ttl;
  /// How long workers go on while the service that keeps the membership is silent. Absent: 60 s, or
  /// `repair_timeout` if that is longer.
  std::optional<Duration> service_timeout;
  /// With `keep_workers`: how long the others wait for a worker that is stopped (SIGSTOP) when
  /// their group has failed. Then it is ended, and replaced like one that has died.
  Duration stopped_timeout = std::chrono::seconds(60);
  /// This is the first node, which serves the job, and prints how others come (`join_door.h`).
  /// Null: they find it by other means.
  std::shared_ptr<const JoinOffer> offer;
  int blacklist_after = 0;  ///< failures of a host after which its nodes are skipped; 0: never
  Duration blacklist_cooldown = std::chrono::seconds(60);
  bool majority = false;    ///< go on only with more than half of the nodes
  bool agent_store = true;  ///< the launcher of node 0 serves the job's store

  // Watching.
  int max_restarts = 0;
  /// The workers that are left after a death stay in their processes (`elastic.h`).
  bool keep_workers = false;
  /// With `keep_workers`: what becomes of a job none of whose ranks has its state any more.
  OnLostState on_lost_state = OnLostState::begin_again;
  int spares = 0;  ///< idle processes on this node that replace workers
  /// Between the notice that the node is to be given up and the signal that ends its workers.
  Duration preempt_grace = std::chrono::seconds(30);
  Duration shutdown_timeout =
      std::chrono::seconds(30);  ///< between SIGTERM (or the signal passed on) and SIGKILL
  /// Signals that end the job. SIGUSR1 and SIGUSR2 are forwarded to the workers unless listed here.
  std::set<int> stop_signals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

  // Output. One entry a local rank, as parse_streams gives them.
  std::optional<std::string> log_dir;
  std::vector<Streams> redirects;
  std::vector<Streams> tee;
  std::optional<std::set<int>>
      shown_ranks;  ///< local ranks whose output reaches the console; absent: all
  std::string line_prefix = "[${rank}] ";  ///< before each line there
  std::optional<std::string> events;       ///< a file for what happens, as JSON lines
  bool events_on_console = false;          ///< the same on standard error
  std::vector<WorkerCpus> cpus;            ///< by local rank; empty: where the launcher may
  std::shared_ptr<NodeNumbers> numbers;    ///< kept up to date for another thread; null: for none

  // The program.
  bool no_python = false;     ///< run it directly whatever its name
  bool module = false;        ///< the program is the name of a Python module
  bool replace_gloo = false;  ///< a Python program's backend gloo becomes muster's
  LocalRankArgument local_rank_argument = LocalRankArgument::none;
  std::string program;
  std::vector<std::string> arguments;
};

struct NodeRange {
  int least = 1, most = 1;
};
/// "4", "2:4".
Result<NodeRange> parse_nodes(const std::string& text);
/// A number from 1, "cpu" (allowed_cores), "gpu" (gpu_count; none is an error) or "auto" (gpu where
/// there are any, else cpu).
Result<int> parse_workers(const std::string& text);
/// "3" for every local rank, or "0:1,1:2" for some: one entry a local rank.
Result<std::vector<Streams>> parse_streams(const std::string& option, const std::string& text,
                                           int workers);
/// "0,2": local ranks.
Result<std::set<int>> parse_rank_set(const std::string& option, const std::string& text,
                                     int workers);

struct Endpoint {
  std::string host;
  std::optional<std::uint16_t> port;
};
/// "host", "host:29400", "[::1]:29400", "::1".
Result<Endpoint> parse_endpoint(const std::string& option, const std::string& text);
/// "host:29400", an IPv6 address in brackets.
std::string endpoint_text(const Endpoint& endpoint);
/// A whole decimal number in [low, high]; errors name `what` and the text.
Result<std::int64_t> parse_whole(const std::string& what, const std::string& text, std::int64_t low,
                                 std::int64_t high);

/// "SIGTERM,SIGUSR1": names of signals that a process can take, with or without SIG.
Result<std::set<int>> parse_signals(const std::string& option, const std::string& text);
/// The rules of the epochs of a job of several nodes, from the options.
membership::EpochOptions epoch_options(const RunOptions& options);
/// Equal for options that start the same program, wherever it lies, with the same arguments. Empty:
/// another program starts the workers.
std::string program_id(const RunOptions& options);
/// Whether nodes may join and leave while the job runs.
inline int least_nodes(const RunOptions& options) {
  return options.min_nodes > 0 ? options.min_nodes : options.nodes;
}
/// Whether a service outside the job keeps its membership. Every launcher then serves a store of
/// its own, for the epochs in which its node is the first.
inline bool meets_in_service(const RunOptions& options) {
  return options.rendezvous == RendezvousKind::etcd ||
         options.rendezvous == RendezvousKind::kubernetes;
}
inline bool is_elastic(const RunOptions& options) { return least_nodes(options) < options.nodes; }

/// Whether Python runs the program, not the program itself.
bool is_python(const RunOptions& options);
/// Returns an error for contradictory options. `workers`, `redirects` and `tee` must be resolved.
Status validate(const RunOptions& options);

// The facts about the nodes that a scheduler gives which starts `muster run` once on every node:
// Slurm's srun, an Indexed Job or JobSet of Kubernetes.

/// Fills what the options leave open: number of nodes, this node's number, address and port of node
/// 0. `nodes_given`: --nnodes was given, and counts. Code::invalid_argument if srun starts several
/// tasks on a node, or --nnodes is not the number of srun's nodes.
Status take_scheduled_node(RunOptions& options, bool nodes_given,
                           const VariableOf& variable = env_text);

}  // namespace muster::launch
