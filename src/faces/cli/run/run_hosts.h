// SPDX-License-Identifier: BSD-3-Clause
/// `muster run --hosts` and `--hostfile`: the nodes of a job on other machines, started by ssh.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "jobs/launch/hosts/host_list.h"
#include "jobs/launch/options.h"
#include "muster/status.h"

namespace muster::cli {

/// The options as they stood on the command line.
struct HostWords {
  std::string hosts, file, ssh = "ssh", folder, muster;
  std::vector<std::string> variables;
};

/// By which function an option with a value is added.
using AddValue =
    std::function<void(const std::string& names, std::string& word, const std::string& what)>;
void add_host_options(CLI::App& app, const std::string& group, HostWords& words,
                      const AddValue& add);

/// Whether the nodes are to be started on other machines.
bool wants_hosts(const CLI::App& app);

/// The machines of the job, in the order of its nodes. Options of `app` that do not go together
/// with them are refused by name.
Result<std::vector<launch::JobHost>> job_hosts(const CLI::App& app, const HostWords& words);

/// Refuses options that mean nothing without --hosts.
Status refuse_lone_words(const CLI::App& app);

/// The name at which the nodes meet: --master-addr, else the first machine.
Result<std::string> meeting_host(const CLI::App& app, const std::vector<launch::JobHost>& hosts);

/// The options of `app` that were given, in the form --name=value, but for those in `without`.
std::vector<std::string> given_words(const CLI::App& app, const std::set<std::string>& without);

/// Starts the job's nodes and waits for them: the exit code. `options` are those of its first node.
int run_on_hosts(const CLI::App& app, const HostWords& words,
                 const std::vector<launch::JobHost>& hosts, const launch::RunOptions& options);

}  // namespace muster::cli
