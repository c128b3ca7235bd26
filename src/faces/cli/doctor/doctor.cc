// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
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
#include "faces/cli/parse.h"
#include "faces/cli/printable.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/options.h"
#include "jobs/launch/workers/process.h"

namespace muster::cli {
namespace {

constexpr Duration kResolverLimit = std::chrono::seconds(20);
constexpr Duration kJobLimit = std::chrono::seconds(4);

class Findings {
 public:
  void say(const char* what, const std::string& text) {
    std::printf("%-18s %s\n", what, printable_line(text).c_str());
  }
  void warn(const char* what, const std::string& text) {
    say(what, text + "   <-- look here");
    troubled_ = true;
  }
  void judge(bool good, const char* what, const std::string& text) {
    good ? say(what, text) : warn(what, text);
  }
  bool troubled() const { return troubled_; }

 private:
  bool troubled_ = false;
};

std::string mebibytes(double bytes) {
  return std::to_string(static_cast<long long>(bytes / (1 << 20))) + " MiB";
}

void look_at_memory(Findings& findings) {
  struct statvfs shared {};
  if (::statvfs("/dev/shm", &shared) == 0) {
    const double free = static_cast<double>(shared.f_bavail) * static_cast<double>(shared.f_frsize);
    const double size = static_cast<double>(shared.f_blocks) * static_cast<double>(shared.f_frsize);
    findings.say("/dev/shm", mebibytes(free) + " free of " + mebibytes(size) +
                                 " (muster itself uses memfds, which count against memory only)");
  } else {
    findings.say("/dev/shm", "not there");
  }
  const Descriptor memory(::memfd_create("muster-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  findings.judge(static_cast<bool>(memory), "memfd",
                 memory ? "works" : "does not work: ranks of one host cannot share memory");
}

void look_at_limit(Findings& findings, const char* what, __rlimit_resource resource, rlim_t least) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return;
  const auto text = [](rlim_t value) {
    return value == RLIM_INFINITY ? std::string("unlimited") : std::to_string(value);
  };
  const std::string now = text(limit.rlim_cur) + " (up to " + text(limit.rlim_max) + ")";
  if (limit.rlim_cur >= least) return findings.say(what, now);
  findings.warn(what, now + "; at least " + std::to_string(least) + " is wise");
}

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
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    findings.say("interface", std::string(entry->ifa_name) + " " +
                                  SocketAddress(entry->ifa_addr, length).host());
  }
  ::freeifaddrs(list);
}

/// Reports the connections that the store and the ranks of a running job have refused.
void look_at_job(Findings& findings, const std::string& place) {
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
  const auto asked = trace::ask_job(**store, {.records = 1});
  for (const auto& [rank, count] : asked ? asked->refusals : std::map<int, std::uint64_t>())
    if (count > 0) by += " by rank " + std::to_string(rank) + ": " + std::to_string(count) + ";";
  findings.judge(by.empty(), "refusals",
                 by.empty()
                     ? "the job's store and ranks have turned nobody away"
                     : "connections that the job has turned away," + by + " their logs say which");
  if (!asked) return findings.say("ranks", asked.status().message());
  for (const std::string& note : asked->notes) findings.say("ranks", note);
}

int examine(const std::string& job) {
  Findings findings;
  if (!job.empty()) look_at_job(findings, job);
  utsname system{};
  ::uname(&system);
  findings.say("muster", MUSTER_VERSION);
  findings.say("system", std::string(system.sysname) + " " + system.release + " " + system.machine);
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
  findings.say("cores", std::to_string(launch::allowed_cores()) +
                            " for this process (affinity and control group)");
  findings.say("GPUs", std::to_string(launch::gpu_count()));
  look_at_memory(findings);
  look_at_limit(findings, "open files", RLIMIT_NOFILE, 1024);
  look_at_limit(findings, "processes", RLIMIT_NPROC, 256);
  findings.judge(
      launch::open_pidfd(::getpid()).ok(), "pidfd",
      launch::open_pidfd(::getpid()).ok() ? "works" : "does not work: Linux 5.3 is needed");
  look_at_secret(findings);
  look_at_encryption(findings);
  look_at_interfaces(findings);
  look_at_scheduler(findings);
  return findings.troubled() ? 1 : 0;
}

}  // namespace

Command doctor_command() {
  auto app = make_app(
      "muster doctor",
      "What this machine offers to a job, and what is in the way of one. Exit code 1 where "
      "something is.");
  auto job = std::make_shared<std::string>();
  app->add_option("--job", *job,
                  "also ask the running job whose store is served there (MUSTER_AGENT_STORE of its "
                  "ranks) whom it turned away; needs the job's secret in the environment")
      ->option_text("HOST:PORT");
  return make_command(app, [job] { return examine(*job); });
}

}  // namespace muster::cli
