// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/run_join.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"
#include "core/base/process/shell_word.h"
#include "core/net/this_host.h"
#include "core/security/secret.h"
#include "faces/cli/run/run_hosts.h"
#include "faces/cli/run/run_words.h"
#include "jobs/launch/node/adopted_secret.h"
#include "jobs/launch/node/join_door.h"

namespace muster::cli {
namespace {

/// How long a node waits for an answer of the first one.
constexpr Duration kDoorLimit = std::chrono::seconds(30);

constexpr std::size_t kLongestLine = 4096;  // limit: a stream that has no token
constexpr std::string_view kJoinOption = "--join";

Status bad_join(const std::string& message) { return Status(Code::invalid_argument, message); }

Status refuse_any(const CLI::App& app, const std::string& what,
                  const std::vector<std::string>& names, const std::string& why) {
  for (const std::string& name : names) {
    if (was_given(app, name))
      return bad_join(what + " and " + name + " exclude each other: " + why);
  }
  return {};
}

bool read_next(char& next) {
  ssize_t got = 0;
  do {
    got = ::read(STDIN_FILENO, &next, 1);
  } while (got < 0 && errno == EINTR);
  return got == 1;
}

/// The first line of standard input, for those who do not want the token in their shell's history.
std::string read_token() {
  if (::isatty(STDIN_FILENO) != 0) std::cerr << "token: " << std::flush;
  std::string token;
  // Nothing is read ahead: what follows is for a worker that inherits the stream.
  char next = 0;
  while (token.size() <= kLongestLine && read_next(next) && next != '\n') token += next;
  const std::size_t end = token.find_last_not_of(" \r\n\t");
  return token.substr(0, end == std::string::npos ? 0 : end + 1);
}

Status join_by_token(const JoinWords& words, launch::RunOptions& options) {
  const auto token = launch::parse_join_token(words.token == "-" ? read_token() : words.token);
  if (!token) return token.status();
  const auto facts = launch::ask_at_door(*token, std::min(kDoorLimit, options.join_timeout));
  if (!facts) return facts.status();
  options.nodes = facts->nodes.most;
  options.min_nodes = facts->nodes.least;
  options.rendezvous = launch::RendezvousKind::assigned_ranks;
  options.endpoint = launch::endpoint_text(facts->store);
  options.run_id = facts->run_id;
  options.node_rank.reset();  // a scheduler's
  options.master_addr.reset();
  options.master_port.reset();
  if (!facts->secret) return {};
  // A token that leads to no secret may lie in other hands. A process that answers it could replace
  // a secret that the user relies on.
  if (launch::has_given_secret())
    return Status(
        Code::refused,
        "--join: the job has a secret of its own, and this node has another one "
        "(MUSTER_SECRET or MUSTER_SECRET_FILE), which no token replaces; take that out of "
        "the environment to come to this job");
  return launch::adopt_secret(*facts->secret);
}

/// The secret of a job that has been given none; absent if it has one, or shall have none.
Result<std::optional<Secret>> secret_of_first_node() {
  const auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  if (launch::has_given_secret() || insecure->value_or(false)) return std::optional<Secret>();
  std::optional<Secret> secret = Secret::random();
  if (Status adopted = launch::adopt_secret(*secret); !adopted) return adopted;
  return secret;
}

Status become_first_node(const CLI::App& app, launch::RunOptions& options) {
  const auto way_out = address_of_default_route();
  if (!options.local_addr && !way_out)
    return bad_join(
        "this machine has no address that others reach: --local-addr names the one to be found at");
  // The contents of --config are among the words, and its file need not be on the other nodes.
  const std::set<std::string> without = {"--nnodes",     "--master-port", "--local-addr",
                                         "--print-join", "--rdzv-id",     "--rdzv-backend",
                                         "--config"};
  std::vector<std::string> words = given_words(app, without);
  words.push_back(options.program);
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  auto secret = secret_of_first_node();
  if (!secret) return secret.status();
  options.offer = std::make_shared<const launch::JoinOffer>(
      launch::JoinOffer{std::move(*secret), shell_words(words)});
  options.rendezvous = launch::RendezvousKind::assigned_ranks;
  const std::string host = options.local_addr ? *options.local_addr : way_out->host();
  options.endpoint = launch::endpoint_text({host, {}});
  if (!options.run_id) options.run_id = random_name(6);
  if (!options.master_port) options.master_port = 0;  // a free one: nobody has to know it
  return {};
}

}  // namespace

std::string shell_words(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) line += ' ' + shell_word(word);
  return line;
}

Status refuse_beside_join(const CLI::App& app, const JoinWords& words) {
  if (was_given(app, "--join")) {
    return refuse_any(app, "--join",
                      {"--print-join", "--nnodes", "--node-rank", "--master-addr", "--master-port",
                       "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--standalone",
                       "--no-agent-store", "--hosts", "--hostfile"},
                      "the token says where the job is, and what it is");
  }
  if (!words.print) return {};
  return refuse_any(app, "--print-join",
                    {"--node-rank", "--master-addr", "--rdzv-backend", "--rdzv-endpoint",
                     "--standalone", "--no-agent-store", "--hosts", "--hostfile"},
                    "the nodes come by a token, and are numbered as they come");
}

Status take_join(const CLI::App& app, const JoinWords& words, launch::RunOptions& options) {
  // A program without a name is refused later, before anything is opened.
  if (options.program.empty()) return {};
  if (was_given(app, "--join")) return join_by_token(words, options);
  const bool open = options.nodes > 1 && !options.node_rank && !options.master_addr &&
                    !options.endpoint && options.agent_store &&
                    options.rendezvous == launch::RendezvousKind::static_ranks;
  if (words.print && !open)
    return bad_join(options.node_rank
                        ? "--print-join: the scheduler has numbered the nodes, which need no token"
                        : "--print-join is for a job of several nodes; say --nnodes");
  if (!open) return {};
  if (!words.print && ::isatty(STDERR_FILENO) == 0) return {};
  return become_first_node(app, options);
}

void hide_token(int count, char** words) {
  bool is_token = false;
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    std::size_t from = word.size();
    if (is_token) from = 0;
    if (word.starts_with(kJoinOption) && word.substr(kJoinOption.size()).starts_with('='))
      from = kJoinOption.size() + 1;
    is_token = !is_token && word == kJoinOption;
    std::memset(words[at] + from, '*', word.size() - from);
  }
}

}  // namespace muster::cli
