// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <map>
#include <set>
#include <string>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/rendezvous/scheduler.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/store/factory.h"
#include "core/trace/responder.h"
#include "faces/cli/doctor/findings.h"
#include "faces/cli/doctor/interfaces.h"
#include "faces/cli/doctor/job_links.h"
#include "faces/cli/doctor/link_probe.h"
#include "faces/cli/json_line.h"
#include "faces/cli/printable.h"
#include "faces/cli/version.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/options.h"

namespace muster::cli {
namespace {

constexpr Duration kResolverLimit = std::chrono::seconds(20);
constexpr Duration kJobLimit = std::chrono::seconds(4);
// Answers come over the very links that are asked about, which may be slow and busy.
constexpr Duration kLinksPatience = std::chrono::seconds(20);

void look_at_secret(Findings& findings) {
  const auto secret = Secret::from_environment(Secret::Use::observe);
  if (!secret) return findings.warn("secret", secret.status().message());
  if (secret->is_observer())
    return findings.say("secret", "an observers' key: it looks at running jobs and joins none");
  switch (secret->kind()) {
    case Secret::Kind::given:
      return findings.say("secret", "given (MUSTER_SECRET, MUSTER_SECRET_FILE or by a launcher)");
    case Secret::Kind::open:
      return findings.warn("secret", "none: MUSTER_INSECURE lets everybody in");
    case Secret::Kind::host:
      return findings.say("secret",
                          "this user's on this host; `muster run` makes one per job, several nodes "
                          "need MUSTER_SECRET");
  }
}

void look_at_encryption(Findings& findings) {
  const auto payloads = payloads_from_environment();
  if (!payloads) return findings.warn("encryption", payloads.status().message());
  const std::string text = "TCP between processes is " + describe(*payloads);
  if (*payloads == Handshake::Payloads::encrypted) return findings.say("encryption", text);
  findings.warn("encryption", text);
}

/// Reports the scheduler that env:// would read.
void look_at_scheduler(Findings& findings) {
  const auto scheduler = detect_scheduler();
  if (!scheduler) return;
  const std::string who = scheduler->name + " as rank " + std::to_string(scheduler->rank) + " of " +
                          std::to_string(scheduler->world_size);
  const bool explicitly = env_text("RANK") || env_text("WORLD_SIZE");
  if (explicitly)
    return findings.say("started by", who + "; but RANK and WORLD_SIZE are set, and go before it");
  const bool addressed = env_text("MASTER_ADDR") && env_text("MASTER_PORT");
  if (addressed || scheduler->can_meet_on_this_host())
    return findings.say("started by", who + ", as which env:// joins the job");
  findings.warn("started by",
                who + ", as which env:// joins the job; it also needs MASTER_ADDR and MASTER_PORT");
}

void look_at_interfaces(Findings& findings) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0)
    return findings.warn("interfaces", "cannot be listed: " + errno_text(errno));
  std::vector<InterfaceAddress> all;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    const bool link_local =
        family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr);
    all.push_back({entry->ifa_name, SocketAddress(entry->ifa_addr, length).host(), link_local});
  }
  ::freeifaddrs(list);
  for (const std::string& line : describe_interfaces(all)) findings.say("interface", line);
  auto addresses = nlohmann::json::array();
  for (const InterfaceAddress& each : all)
    addresses.push_back({{"interface", each.interface}, {"address", each.address}});
  findings.attach("addresses", std::move(addresses));
}

void tell_links(Findings& findings, const HostLinks& found) {
  for (const std::string& line : describe(found)) findings.say("links", line);
  const auto known = [](double value) {
    return value > 0 ? nlohmann::json(value) : nlohmann::json(nullptr);
  };
  auto links = nlohmann::json::array();
  for (const HostLink& each : found.links)
    links.push_back({{"from", found.hosts[each.from]},
                     {"to", found.hosts[each.to]},
                     {"round_trip_ms", known(each.round_trip_ms)},
                     {"mbit_per_s", known(each.mbit_per_s)},
                     {"resent", each.resent}});
  findings.attach("links", std::move(links));
  if (const auto order = ring_of(found)) {
    auto names = nlohmann::json::array();
    for (const std::size_t host : *order) names.push_back(found.hosts[host]);
    findings.attach("ring", std::move(names));
  }
}

/// Reports the connections that the store and the ranks of a running job have refused, and with
/// `links` the links between its hosts.
void look_at_job(Findings& findings, const std::string& place, bool links) {
  const auto endpoint = launch::parse_endpoint("--job", place);
  if (!endpoint) return findings.warn("job", endpoint.status().message());
  store::TcpStoreOptions options;
  options.host = endpoint->host;
  if (endpoint->port) options.port = *endpoint->port;
  options.timeout = kJobLimit;
  options.role = Handshake::Role::observer;
  const auto store = store::make_tcp_store(options);
  const auto refused = store ? (*store)->count_refusals() : Result<std::int64_t>(store.status());
  if (!refused) return findings.warn("job", refused.status().message());
  std::string by;
  if (*refused > 0) by = " by its store: " + std::to_string(*refused) + ";";
  trace::AskOptions question{.records = 1, .links = links};
  if (links) question.patience = kLinksPatience;
  const auto asked = trace::ask_job(**store, question);
  for (const auto& [rank, count] : asked ? asked->refusals : std::map<int, std::uint64_t>())
    if (count > 0) by += " by rank " + std::to_string(rank) + ": " + std::to_string(count) + ";";
  findings.judge(by.empty(), "refusals",
                 by.empty()
                     ? "the job's store and ranks have turned nobody away"
                     : "connections that the job has turned away," + by + " their logs say which");
  if (!asked) return findings.judge(!links, "ranks", asked.status().message());
  for (const std::string& note : asked->notes) findings.say("ranks", note);
  if (links) tell_links(findings, links_between_hosts(*asked));
}

/// As a rank of a job that is there to measure the links between its hosts.
int probe(bool as_json) {
  const bool is_rank = (env_text("RANK") && env_text("WORLD_SIZE")) || detect_scheduler();
  if (!is_rank)
    return complain("doctor",
                    "--links needs --job HOST:PORT of a running job, or must run on the hosts that "
                    "are meant: muster run --hosts node1,node2 --nproc-per-node 1 "
                    "$(command -v muster) doctor --links");
  const auto probed = probe_links();
  if (!probed) return complain("doctor", probed.status().message());
  if (probed->rank != 0) return 0;
  Findings findings(as_json);
  tell_links(findings, probed->links);
  return findings.conclude();
}

int examine(const std::string& job, bool links, bool as_json) {
  if (links && job.empty()) return probe(as_json);
  Findings findings(as_json);
  if (!job.empty()) look_at_job(findings, job, links);
  findings.say("muster",
               std::string(MUSTER_VERSION) + (commit().empty() ? "" : " (" + commit() + ")"));
  look_at_programs(findings);
  look_at_machine(findings);
  const std::string name = launch::full_host_name();
  const auto addresses = resolve(name, 0, deadline_after(steady_clock(), kResolverLimit));
  std::set<std::string> hosts;
  if (addresses) {
    for (const SocketAddress& address : *addresses) hosts.insert(address.host());
  }
  std::string known;
  for (const std::string& host : hosts) known += " " + host;
  findings.judge(addresses.ok(), "host name",
                 name + (addresses.ok() ? " ->" + known
                                        : " is not known to the resolver; put it into /etc/hosts"));
  look_at_secret(findings);
  look_at_encryption(findings);
  look_at_interfaces(findings);
  look_at_scheduler(findings);
  return findings.conclude();
}

}  // namespace

Command doctor_command() {
  auto app = make_app(
      "muster doctor",
      "What this machine offers to a job, and what is in the way of one: the last line is the "
      "verdict. Exit code 1 where something is in the way.");
  struct DoctorOptions {
    std::string job;
    bool links = false, json = false;
  };
  auto options = std::make_shared<DoctorOptions>();
  app->add_option("--job", options->job,
                  "also ask the running job whose store is served there (MUSTER_AGENT_STORE of its "
                  "ranks) whom it turned away; needs the job's secret in the environment")
      ->option_text("HOST:PORT");
  app->add_flag("--links", options->links,
                "the rate and the round trip between each two hosts: of those of --job as measured "
                "while the job used them; without --job of the hosts on which it runs as the ranks "
                "of a job (muster run --hosts), and nothing else is looked at");
  app->add_flag("--json", options->json, kJsonHelp);
  return make_command(app,
                      [options] { return examine(options->job, options->links, options->json); });
}

}  // namespace muster::cli
