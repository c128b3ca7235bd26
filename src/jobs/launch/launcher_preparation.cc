// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/launcher_preparation.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <optional>
#include <sstream>
#include <thread>

#include "core/base/environment.h"
#include "core/base/process/temporary_folder.h"
#include "core/base/threads/thread_start.h"
#include "core/net/socket_address.h"
#include "jobs/launch/epoch_words.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/node/join_door.h"
#include "jobs/launch/node_numbers.h"

namespace muster::launch {
namespace {

/// Opens the door for the other nodes, and prints the line by which they come: not by the log,
/// which others may keep and read.
Status open_door(const RunOptions& options, NodeJob& job) {
  const auto place = parse_endpoint("--local-addr", options.endpoint.value_or(""));
  if (!place) return place.status();
  const JoinFacts facts{options.offer->secret,
                        {place->host, job.master_port},
                        job.run_id,
                        {least_nodes(options), options.nodes}};
  auto door =
      JoinDoor::open(place->host, facts, deadline_after(steady_clock(), options.join_timeout));
  if (!door) return door.status().with_context("opening the job to nodes that come by a token");
  const int others = options.nodes - 1;
  const std::string text = options.command + ": on " + (is_elastic(options) ? "up to " : "") +
                           std::to_string(others) + (others == 1 ? " other node" : " other nodes") +
                           " type" + (facts.secret ? "" : ", with the same secret as here") +
                           ":\n  muster run --join " + (*door)->token().text() +
                           options.offer->words + "\n";
  std::cerr << text << std::flush;
  if (!std::cerr)
    return Status(
        Code::exhausted,
        "the line for the other nodes cannot be written to standard error: " + errno_text(errno));
  job.door = std::move(*door);
  return {};
}

Result<Prepared> prepare(const RunOptions& options) {
  auto secret = job_secret(options);
  if (!secret) return secret.status();
  // Workers get the secret in a sealed file. In this environment it would be readable as long as
  // the job runs.
  wipe_env("MUSTER_SECRET");
  auto job = open_job(options, *secret);
  if (!job) return job.status();
  if (options.numbers && job->hosts_store) options.numbers->put_store(job->store);
  if (options.offer) {
    if (Status opened = open_door(options, *job); !opened) return opened;
  }
  Descriptor secret_file;
  if (secret->kind() == Secret::Kind::given) {
    auto sealed = secret->sealed();
    if (!sealed) return sealed.status();
    secret_file = std::move(*sealed);
  }
  std::unique_ptr<NodeMembership> nodes;
  if (options.nodes > 1 || options.keep_workers) {
    auto joined = join_nodes(options, *job, *secret);
    if (!joined) return joined.status();
    nodes = std::move(*joined);
    const bool is_first = job->hosts_store && !meets_in_service(options);
    if (const std::string words = waiting_text(options); is_first && !words.empty())
      std::cerr << options.command << ": " << words << std::endl;
  }
  return Prepared{std::move(secret_file), std::move(*job), std::move(nodes)};
}

}  // namespace

// Runs `prepare` on its own thread: none of its waits handles signals.
Result<Prepared> prepare_or_be_stopped(const RunOptions& options, SignalWatch& signals) {
  Descriptor done(::eventfd(0, EFD_CLOEXEC));
  if (!done) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  std::optional<Result<Prepared>> prepared;
  auto preparing = start_thread("the thread that joins the job", [&] {
    prepared = prepare(options);
    const std::uint64_t one = 1;
    // The first word in an empty count always has room.
    [[maybe_unused]] const ssize_t written = ::write(done.get(), &one, sizeof one);
  });
  if (!preparing) return preparing.status();
  for (;;) {
    pollfd ready[2] = {{done.get(), POLLIN, 0}, {signals.descriptor(), POLLIN, 0}};
    // After a handler has run it is asked again; no other failure is possible here but one of the
    // kernel's memory, which may pass.
    if (::poll(ready, 2, -1) < 0) continue;
    if (ready[0].revents != 0) break;
    for (int signal : signals.take()) {
      if (!options.stop_signals.contains(signal)) continue;
      std::cerr << options.command << ": stopped by " << signal_name(signal)
                << " while joining the job's store" << std::endl;
      preparing->detach();  // it ends with the process
      ::_exit(128 + signal);
    }
  }
  preparing->join();
  return std::move(*prepared);
}

JobEnvironment job_environment(const RunOptions& options, const NodeJob& job,
                               const Descriptor& secret_file) {
  JobEnvironment environment;
  environment.run_id = job.run_id;
  environment.role = options.role;
  environment.max_restarts = options.max_restarts;
  environment.fail_without_state = options.on_lost_state == OnLostState::fail;
  if (options.agent_store)
    environment.agent_store = endpoint_text({job.master_addr, job.master_port});
  if (secret_file)
    environment.secret_place = std::to_string(::getpid()) + ":" + std::to_string(secret_file.get());
  if (options.workers > 1) environment.threads = std::max(1, allowed_cores() / options.workers);
  return environment;
}

LauncherRules launcher_rules(const RunOptions& options, const NodeJob& job, bool by_epoch) {
  LauncherRules rules;
  rules.workers = options.workers;
  rules.max_restarts = options.max_restarts;
  rules.shutdown_timeout = options.shutdown_timeout;
  rules.by_epoch = by_epoch;
  rules.keep = options.keep_workers;
  rules.preempt_grace = options.preempt_grace;
  // With a service the store is for the workers of an epoch, whose end is that of their need of it.
  rules.serves_store = by_epoch && job.hosts_store && !meets_in_service(options);
  rules.may_leave = is_elastic(options) && !rules.serves_store;
  return rules;
}

Result<LogPlace> log_place(const RunOptions& options, const NodeJob& job) {
  const auto any = [](const std::vector<Streams>& list) {
    return std::any_of(list.begin(), list.end(),
                       [](Streams streams) { return streams != Streams::none; });
  };
  if (!any(options.redirects) && !any(options.tee)) return LogPlace{};
  LogPlace place{options.log_dir.value_or(""), {}};
  std::istringstream id(job.run_id);
  for (std::string part; std::getline(id, part, '/');) {
    if (!part.empty()) place.folders.push_back(part);
  }
  if (place.base.empty()) {
    auto made = make_temporary_folder("muster_");
    if (!made) return made.status();
    place.base = std::move(*made);
    std::cerr << options.command << ": logs are in " << place.base << std::endl;
  }
  return place;
}

}  // namespace muster::launch
