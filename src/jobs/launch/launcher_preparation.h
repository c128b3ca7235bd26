// SPDX-License-Identifier: BSD-3-Clause
/// A launcher's steps before its first worker starts: it finds the job's store, its place among the
/// nodes, and the folder of the logs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "jobs/launch/launcher_machine.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/launch/node/node_rendezvous.h"
#include "jobs/launch/options.h"
#include "jobs/launch/workers/event_loop.h"
#include "jobs/launch/workers/worker_commands.h"

namespace muster::launch {

struct Prepared {
  /// For the workers; invalid: they read the secret from where this process did.
  Descriptor secret_file;
  NodeJob job;
  std::unique_ptr<NodeMembership> nodes;  ///< if epochs start the workers
};

/// Name lookups, stores and other nodes may block it for the whole join timeout. A stop signal
/// meanwhile ends this process at once, with that signal's exit code.
Result<Prepared> prepare_or_be_stopped(const RunOptions& options, SignalWatch& signals);

/// `secret_file` as in Prepared.
JobEnvironment job_environment(const RunOptions& options, const NodeJob& job,
                               const Descriptor& secret_file);
/// `by_epoch`: epochs start the workers.
LauncherRules launcher_rules(const RunOptions& options, const NodeJob& job, bool by_epoch);

/// The folders of redirected output.
struct LogPlace {
  std::string base;  ///< empty: nothing is redirected
  std::vector<std::string> folders;
  std::string path() const {
    std::string whole = base;
    for (const std::string& each : folders) whole += "/" + each;
    return whole;
  }
};

/// Makes a temporary folder, and says which, if output is redirected and the user named none.
Result<LogPlace> log_place(const RunOptions& options, const NodeJob& job);

}  // namespace muster::launch
