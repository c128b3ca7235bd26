// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/run_hosts.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>

#include "core/base/environment.h"
#include "core/security/secret.h"
#include "faces/cli/run/run_words.h"
#include "jobs/launch/hosts/remote_nodes.h"
#include "jobs/launch/node/adopted_secret.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/worker_commands.h"

namespace muster::cli {
namespace {

using launch::JobHost;

Status bad_hosts(const std::string& message) { return Status(Code::invalid_argument, message); }

std::string last_word(const CLI::App& app, const std::string& name) {
  return was_given(app, name) ? app.get_option(name)->results().back() : std::string();
}

/// Options that contradict --hosts, and why.
struct Beside {
  const char* name;
  const char* why;
};
constexpr Beside kBesideHosts[] = {
    {"--standalone", "it is for one node on this machine"},
    {"--node-rank", "the nodes are numbered in the order of the list"},
    {"--rdzv-endpoint",
     "the nodes meet at the first machine; --master-addr and --master-port name "
     "another address of it"},
    {"--local-addr", "it is an address of one node, and all nodes get the same options"},
};

/// Those that are for this machine, or that each node gets with a value of its own.
const std::set<std::string> kNotForNodes = {
    "--hosts",  "--hostfile", "--ssh",       "--wdir",        "--env",         "--remote-muster",
    "--config", "--nnodes",   "--node-rank", "--master-addr", "--rdzv-backend"};

/// Variables that a launcher sets for one process.
const std::set<std::string> kOfOneProcess = {
    "MUSTER_AGENT_STORE", "MUSTER_EPOCH",     "MUSTER_LAUNCH",      "MUSTER_LAUNCHER_NEWS",
    "MUSTER_SPARE",       "MUSTER_COMMITTED", "MUSTER_STATE_EPOCH", "MUSTER_ON_LOST_STATE"};

/// MUSTER_* of this process and those that --env names. Secrets go by themselves.
Result<std::vector<std::string>> variables_for_nodes(const std::vector<std::string>& named) {
  const launch::Environment all = launch::inherited_environment();
  launch::Environment chosen;
  for (const auto& [name, value] : all) {
    if (name.starts_with("MUSTER_") && !name.starts_with("MUSTER_SECRET") &&
        !kOfOneProcess.contains(name))
      chosen[name] = value;
  }
  for (const std::string& word : named) {
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (name.empty()) return bad_hosts("--env: \"" + word + "\" is neither NAME nor NAME=VALUE");
    if (name.starts_with("MUSTER_SECRET"))
      return bad_hosts("--env " + name + ": the nodes get the job's secret without it");
    const auto found = all.find(name);
    if (equals == std::string::npos && found == all.end())
      return bad_hosts("--env " + name + ": it is not set here; write " + name + "=VALUE");
    chosen[name] = equals == std::string::npos ? found->second : word.substr(equals + 1);
  }
  return launch::flatten(chosen);
}

/// The user's, or one for this job; none where the job has none.
Result<std::optional<Secret>> secret_for_nodes() {
  const auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  const bool given = launch::has_given_secret();
  if (!given && insecure->value_or(false)) return std::optional<Secret>();
  auto secret = given ? Secret::from_environment() : Result<Secret>(Secret::random());
  if (!secret) return secret.status();
  wipe_env("MUSTER_SECRET");
  return std::optional<Secret>(std::move(*secret));
}

/// As `muster run` has it on the node. `id` is the job's if it was given no other.
std::vector<std::string> words_of_node(const CLI::App& app, const std::vector<JobHost>& hosts,
                                       std::size_t node, const launch::RunOptions& options,
                                       const std::string& id) {
  std::set<std::string> without = kNotForNodes;
  const JobHost& host = hosts[node];
  if (host.workers) without.insert("--nproc-per-node");
  std::vector<std::string> words = given_words(app, without);
  if (host.workers) words.push_back("--nproc-per-node=" + std::to_string(*host.workers));
  words.push_back("--nnodes=" + std::to_string(hosts.size()));
  if (hosts.size() > 1) {
    words.push_back("--node-rank=" + std::to_string(node));
    words.push_back("--master-addr=" + *options.master_addr);
    if (!options.run_id) words.push_back("--rdzv-id=" + id);
  }
  words.push_back("--");
  words.push_back(options.program);
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  return words;
}

Result<std::string> folder_for_nodes(const std::string& word) {
  std::error_code error;
  const auto here = std::filesystem::current_path(error);
  if (error && !word.starts_with('/'))
    return bad_hosts("this folder has no path (" + error.message() +
                     "); --wdir names the one to work in");
  return word.empty() ? here.string() : (here / word).lexically_normal().string();
}

Result<std::vector<launch::RemoteNode>> nodes_of(const CLI::App& app, const HostWords& words,
                                                 const std::vector<JobHost>& hosts,
                                                 const launch::RunOptions& options) {
  auto folder = folder_for_nodes(words.folder);
  if (!folder) return folder.status();
  // First, since it wipes the secret from the environment, which the next one copies.
  auto secret = secret_for_nodes();
  if (!secret) return secret.status();
  auto variables = variables_for_nodes(words.variables);
  if (!variables) return variables.status();
  // A node of another job with the same secret and the same place would come into this one.
  const std::string id = random_name(6);
  std::vector<launch::RemoteNode> nodes;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    nodes.push_back({hosts[i].destination,
                     {*secret, *folder, *variables, words_of_node(app, hosts, i, options, id)}});
  }
  return nodes;
}

std::vector<std::string> split_words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace

void add_host_options(CLI::App& app, const std::string& group, HostWords& words,
                      const AddValue& add) {
  add("--hosts", words.hosts,
      "Machines to start the nodes on by ssh: NAME, NAME:WORKERS, USER@NAME, [ADDRESS]:WORKERS, "
      "separated by commas; the nodes meet at the first");
  add("--hostfile", words.file,
      "The same from a file, one machine a line, also as \"NAME slots=WORKERS\"; # begins a "
      "comment");
  add("--ssh", words.ssh,
      "With --hosts, the ssh to use and its options, separated by spaces. It must log in without "
      "asking. Default ssh");
  add("--wdir", words.folder, "With --hosts, the folder to work in there. Default this one");
  app.add_option("-x,--env", words.variables,
                 "With --hosts, NAME or NAME=VALUE: a variable for the nodes, beside MUSTER_*; may "
                 "be given several times")
      ->option_text("NAME[=VALUE]")
      ->group(group)
      ->allow_extra_args(false);
  add("--remote-muster", words.muster,
      "With --hosts, the path of muster there. Default that of this one");
}

std::vector<std::string> given_words(const CLI::App& app, const std::set<std::string>& without) {
  std::vector<std::string> words;
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty() || option == app.get_help_ptr())
      continue;
    const std::string name = "--" + option->get_lnames().front();
    if (without.contains(name)) continue;
    const std::string value = option->results().back();
    if (option->get_items_expected_max() > 0) {
      if (!value.empty()) words.push_back(name + "=" + value);
    } else if (value != "false") {
      words.push_back(name);
    }
  }
  return words;
}

bool wants_hosts(const CLI::App& app) {
  return was_given(app, "--hosts") || was_given(app, "--hostfile");
}

Result<std::vector<JobHost>> job_hosts(const CLI::App& app, const HostWords& words) {
  if (was_given(app, "--hosts") && was_given(app, "--hostfile"))
    return bad_hosts("--hosts and --hostfile exclude each other");
  const std::string what = was_given(app, "--hosts") ? "--hosts" : "--hostfile";
  for (const Beside& each : kBesideHosts) {
    if (was_given(app, each.name))
      return bad_hosts(what + " and " + each.name + " exclude each other: " + each.why);
  }
  const std::string backend = last_word(app, "--rdzv-backend");
  if (!backend.empty() && backend != "static")
    return bad_hosts(what + " and --rdzv-backend " + backend +
                     " exclude each other: the nodes are those of the list, no others join");
  auto hosts = was_given(app, "--hosts") ? launch::parse_hosts(words.hosts)
                                         : launch::read_host_file(words.file);
  if (!hosts) return hosts;
  if (const std::string nodes = last_word(app, "--nnodes");
      !nodes.empty() && nodes != std::to_string(hosts->size()))
    return bad_hosts("--nnodes " + nodes + ": " + what + " names " + std::to_string(hosts->size()) +
                     " machines, each of which is a node; leave --nnodes out");
  const bool all_numbered =
      std::all_of(hosts->begin(), hosts->end(), [](const JobHost& host) { return host.workers; });
  if (all_numbered && was_given(app, "--nproc-per-node"))
    return bad_hosts("--nproc-per-node: " + what +
                     " gives each machine its number of workers; leave one of the two out");
  return hosts;
}

Status refuse_lone_words(const CLI::App& app) {
  for (const char* const name : {"--ssh", "--wdir", "--env", "--remote-muster"}) {
    if (was_given(app, name))
      return bad_hosts(std::string(name) +
                       " is for --hosts and --hostfile, which start nodes on "
                       "other machines");
  }
  return {};
}

Result<std::string> meeting_host(const CLI::App& app, const std::vector<JobHost>& hosts) {
  if (const std::string told = last_word(app, "--master-addr"); !told.empty()) return told;
  const std::string name = hosts.front().name();
  const auto elsewhere = std::find_if(hosts.begin(), hosts.end(), [](const JobHost& host) {
    return !launch::is_loopback_name(host.name());
  });
  if (hosts.size() > 1 && launch::is_loopback_name(name) && elsewhere != hosts.end())
    return bad_hosts(name + " is another machine for " + elsewhere->name() +
                     ": put the name that the other machines have for the first one there, or say "
                     "it with --master-addr");
  return name;
}

int run_on_hosts(const CLI::App& app, const HostWords& words, const std::vector<JobHost>& hosts,
                 const launch::RunOptions& options) {
  auto nodes = nodes_of(app, words, hosts, options);
  launch::RemoteOptions remote;
  remote.command = options.command;
  remote.ssh = split_words(words.ssh);
  remote.muster = words.muster.empty() ? launch::own_program() : words.muster;
  remote.connect_timeout = std::min(remote.connect_timeout, options.join_timeout);
  remote.ending_timeout += options.shutdown_timeout;
  if (options.keep_workers) remote.ending_timeout += options.preempt_grace;
  remote.stop_signals = options.stop_signals;
  const Status known = !nodes               ? nodes.status()
                       : remote.ssh.empty() ? bad_hosts("--ssh names no program")
                                            : Status();
  if (known) return launch::run_remote_nodes(remote, *nodes);
  std::cerr << options.command << ": " << known.message() << std::endl;
  return 2;
}

}  // namespace muster::cli
