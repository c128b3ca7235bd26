// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/options.h"

#include <charconv>

#include "core/base/hash.h"
#include "core/net/this_host.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/process.h"

namespace muster::launch {
namespace {

Status bad(const std::string& message) { return Status(Code::invalid_argument, message); }

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t from = 0;
  for (std::size_t at = text.find(separator); at != std::string::npos;
       at = text.find(separator, from)) {
    parts.push_back(text.substr(from, at - from));
    from = at + 1;
  }
  parts.push_back(text.substr(from));
  return parts;
}

Result<Streams> parse_stream_number(const std::string& option, const std::string& text) {
  auto number = parse_whole(option, text, 0, 3);
  if (!number)
    return bad(option + ": \"" + text +
               "\" is none of 0 (nothing), 1 (stdout), 2 (stderr), 3 (both)");
  return static_cast<Streams>(*number);
}

Result<int> gpus() {
  const int count = gpu_count();
  if (count == 0)
    return bad(
        "--nproc-per-node gpu: this machine shows no GPU (/dev/nvidia0); use cpu, auto or a "
        "number");
  return count;
}

}  // namespace

Result<std::int64_t> parse_whole(const std::string& what, const std::string& text, std::int64_t low,
                                 std::int64_t high) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return bad(what + ": \"" + text + "\" is not a whole number from " + std::to_string(low) +
               " to " + std::to_string(high));
  }
  return value;
}

Result<NodeRange> parse_nodes(const std::string& text) {
  const auto parts = split(text, ':');
  if (parts.size() > 2) return bad("--nnodes: \"" + text + "\" is neither N nor MIN:MAX");
  constexpr int kMostNodes = 1 << 20;  // limit: a number that is a mistake
  auto low = parse_whole("--nnodes", parts.front(), 1, kMostNodes);
  if (!low) return low.status();
  auto high = parse_whole("--nnodes", parts.back(), 1, kMostNodes);
  if (!high) return high.status();
  if (*low > *high) return bad("--nnodes: in \"" + text + "\" the least number is above the most");
  return NodeRange{static_cast<int>(*low), static_cast<int>(*high)};
}

Result<int> parse_workers(const std::string& text) {
  if (text == "cpu") return allowed_cores();
  if (text == "gpu") return gpus();
  if (text == "auto") return gpu_count() > 0 ? gpu_count() : allowed_cores();
  auto number = parse_whole("--nproc-per-node", text, 1, 1 << 16);
  if (!number)
    return bad("--nproc-per-node: \"" + text +
               "\" is neither a number from 1 nor cpu, gpu or auto");
  return static_cast<int>(*number);
}

Result<std::vector<Streams>> parse_streams(const std::string& option, const std::string& text,
                                           int workers) {
  std::vector<Streams> result(static_cast<std::size_t>(workers), Streams::none);
  if (text.empty()) return result;
  if (text.find(':') == std::string::npos) {
    auto all = parse_stream_number(option, text);
    if (!all) return all.status();
    result.assign(result.size(), *all);
    return result;
  }
  for (const std::string& entry : split(text, ',')) {
    const auto parts = split(entry, ':');
    if (parts.size() != 2)
      return bad(option + ": \"" + entry + "\" is not LOCAL_RANK:STREAMS, as in 0:3,1:2");
    auto rank = parse_whole(option + ", local rank", parts[0], 0, workers - 1);
    if (!rank) return rank.status();
    auto streams = parse_stream_number(option, parts[1]);
    if (!streams) return streams.status();
    result[static_cast<std::size_t>(*rank)] = *streams;
  }
  return result;
}

Result<std::set<int>> parse_rank_set(const std::string& option, const std::string& text,
                                     int workers) {
  std::set<int> ranks;
  for (const std::string& entry : split(text, ',')) {
    auto rank = parse_whole(option + ", local rank", entry, 0, workers - 1);
    if (!rank) return rank.status();
    ranks.insert(static_cast<int>(*rank));
  }
  return ranks;
}

Result<Endpoint> parse_endpoint(const std::string& option, const std::string& text) {
  Endpoint endpoint{text, {}};
  std::string port;
  const std::size_t colon = text.rfind(':');
  if (text.starts_with('[')) {
    const std::size_t close = text.find(']');
    if (close == std::string::npos || (close + 1 < text.size() && text[close + 1] != ':')) {
      return bad(option + ": \"" + text + "\" is not [ADDRESS]:PORT");
    }
    endpoint.host = text.substr(1, close - 1);
    if (close + 1 < text.size()) port = text.substr(close + 2);
  } else if (colon != std::string::npos && text.find(':') == colon) {
    endpoint.host = text.substr(0, colon);
    port = text.substr(colon + 1);
  }
  if (endpoint.host.empty())
    return bad(option + ": \"" + text + "\" names no host; write HOST:PORT");
  if (!port.empty()) {
    auto number = parse_whole(option + ", port", port, 0, 65535);
    if (!number) return number.status();
    endpoint.port = static_cast<std::uint16_t>(*number);
  }
  return endpoint;
}

std::string endpoint_text(const Endpoint& endpoint) {
  const bool bare = endpoint.host.find(':') == std::string::npos;
  return (bare ? endpoint.host : "[" + endpoint.host + "]") +
         (endpoint.port ? ":" + std::to_string(*endpoint.port) : "");
}

Result<std::set<int>> parse_signals(const std::string& option, const std::string& text) {
  std::set<int> signals;
  for (const std::string& entry : split(text, ',')) {
    const std::string name = entry.starts_with("SIG") ? entry : "SIG" + entry;
    int found = 0;
    for (int signal = 1; signal < 32 && found == 0; ++signal) {
      if (signal_name(signal) == name) found = signal;
    }
    if (found == 0 || found == SIGKILL || found == SIGSTOP || found == SIGCHLD)
      return bad(option + ": \"" + entry +
                 "\" is no signal that a launcher can take; there are SIGTERM, SIGINT, SIGHUP, "
                 "SIGQUIT, SIGUSR1, SIGUSR2 and others, separated by commas");
    signals.insert(found);
  }
  return signals;
}

membership::EpochOptions epoch_options(const RunOptions& options) {
  membership::EpochOptions epochs;
  epochs.min_nodes = least_nodes(options);
  epochs.max_nodes = options.nodes;
  epochs.max_restarts = options.max_restarts;
  epochs.join_timeout = options.join_timeout;
  epochs.last_call = options.last_call;
  epochs.repair_timeout = options.repair_timeout;
  // A fixed number of nodes without restarts cannot use a replacement.
  epochs.wait_for_nodes = is_elastic(options) || options.max_restarts > 0;
  epochs.majority = options.majority;
  epochs.keeps_state = options.keep_workers;
  epochs.blacklist_after = options.blacklist_after;
  epochs.blacklist_cooldown = options.blacklist_cooldown;
  epochs.program_id = program_id(options);
  return epochs;
}

std::string program_id(const RunOptions& options) {
  if (options.program.empty()) return {};
  // Hosts may have it in different folders.
  std::string words = options.program.substr(options.program.rfind('/') + 1);
  for (const std::string& each : options.arguments) words += '\0' + each;
  return std::to_string(hash_of(words));
}

bool is_python(const RunOptions& options) {
  return !options.no_python && (options.module || options.program.ends_with(".py"));
}

Status validate(const RunOptions& options) {
  if (options.standalone && options.nodes != 1)
    return bad("--standalone is for one node; leave out --nnodes, or --standalone");
  if (options.node_rank && *options.node_rank >= options.nodes) {
    return bad("--node-rank " + std::to_string(*options.node_rank) + " is outside 0.." +
               std::to_string(options.nodes - 1) + " (--nnodes " + std::to_string(options.nodes) +
               ")");
  }
  const bool etcd = options.rendezvous == RendezvousKind::etcd;
  const bool in_service = meets_in_service(options);
  const bool assigned = in_service || options.rendezvous == RendezvousKind::assigned_ranks;
  const std::string backend = etcd ? "etcd" : "kubernetes";
  if (etcd && !options.endpoint)
    return bad(
        "--rdzv-backend etcd needs --rdzv-endpoint: HOST:PORT of one or more of its members, "
        "separated by commas");
  if (in_service && !options.run_id)
    return bad("--rdzv-backend " + backend + " needs a --rdzv-id of the job's own: " + backend +
               " keeps what it knows of earlier jobs");
  if (in_service && (options.node_rank || options.master_addr || options.master_port))
    return bad("--rdzv-backend " + backend +
               " numbers the nodes itself and needs no address of node 0: leave --node-rank, "
               "--master-addr and --master-port out");
  if (is_elastic(options) && !assigned) {
    return bad("--nnodes " + std::to_string(least_nodes(options)) + ":" +
               std::to_string(options.nodes) +
               ": nodes that join and leave have no numbers of their own; say --rdzv-backend c10d, "
               "etcd or kubernetes, or give one number of nodes");
  }
  if (options.nodes > 1 && !assigned && !options.node_rank) {
    return bad("--nnodes " + std::to_string(options.nodes) +
               " needs --node-rank on every node (or --rdzv-backend c10d, which assigns it; or "
               "--print-join, which prints what to type on the others)");
  }
  if (options.nodes > 1 && !in_service && !options.master_addr && !options.endpoint) {
    return bad("--nnodes " + std::to_string(options.nodes) +
               " needs the address of node 0: --master-addr or --rdzv-endpoint HOST:PORT");
  }
  if (options.nodes > 1 && !options.agent_store)
    return bad("--no-agent-store is for one node: several nodes find each other through the store");
  if (options.run_id &&
      (options.run_id->empty() || options.run_id->find('/') != std::string::npos ||
       options.run_id->starts_with('.'))) {
    return bad("--rdzv-id \"" + *options.run_id +
               "\": it names a directory of logs, so it may not be empty, start with a dot or hold "
               "a slash");
  }
  if (options.keep_workers && options.max_restarts == 0)
    return bad("--elastic keep needs --max-restarts N: how many deaths of workers are repaired");
  if (options.keep_workers && !options.agent_store)
    return bad("--elastic keep and --no-agent-store exclude each other");
  if (options.spares > 0 && !options.keep_workers)
    return bad("--spares is for --elastic keep, where single workers are replaced");
  if (options.program.empty())
    return bad("no program was given; say: " + options.command + " [options] program [arguments]");
  if (options.replace_gloo && !is_python(options)) {
    return bad(
        "--replace-gloo is for Python programs that the launcher starts by Python: give a file "
        "that ends in .py (not \"" +
        options.program + "\"), or -m and a module");
  }
  return {};
}

Status take_scheduled_node(RunOptions& options, bool nodes_given, const VariableOf& variable) {
  const auto scheduled = detect_node(variable);
  if (!scheduled || options.standalone || options.node_rank || options.endpoint ||
      options.rendezvous != RendezvousKind::static_ranks)
    return {};
  const int nodes = scheduled->nodes.value_or(options.nodes);
  if (nodes == 1 || (nodes_given && options.nodes == 1)) return {};
  if (scheduled->tasks_on_node > 1) {
    return Status(Code::invalid_argument,
                  options.command + " was started " + std::to_string(scheduled->tasks_on_node) +
                      " times on this node by " + scheduled->name +
                      "; it starts the workers itself: srun --ntasks-per-node=1 " +
                      options.command + " --nproc-per-node N ...");
  }
  if (nodes_given && options.nodes != nodes) {
    return Status(Code::invalid_argument, "--nnodes " + std::to_string(options.nodes) + ": " +
                                              scheduled->name + " has started this on " +
                                              std::to_string(nodes) +
                                              " nodes; leave --nnodes out to take that");
  }
  options.nodes = options.min_nodes = nodes;
  options.node_rank = scheduled->node_rank;
  if (!options.master_addr && !scheduled->master.empty())
    options.master_addr =
        scheduled->master_shares_domain ? in_own_domain(scheduled->master) : scheduled->master;
  if (!options.master_port) options.master_port = scheduled->port;
  return {};
}

}  // namespace muster::launch
