// SPDX-License-Identifier: BSD-3-Clause
#include "testing/network_namespaces.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"

namespace muster::testing {
namespace {

/// Runs lines of `ip -batch`; in `where`, or in this namespace where that is empty.
Status ip(const std::string& where, const std::string& lines) {
  const std::string command =
      std::string("ip ") + (where.empty() ? "" : "-n " + where + " ") + "-batch - 2>&1";
  // popen reads or writes, not both: what ip says goes to the test's own output.
  std::FILE* const pipe = ::popen(command.c_str(), "we");
  if (pipe == nullptr) return Status(Code::internal, "cannot run ip: " + errno_text(errno));
  std::fwrite(lines.data(), 1, lines.size(), pipe);
  const int status = ::pclose(pipe);
  if (status == 0) return {};
  return Status(Code::unsupported, "ip could not do this (it needs root, and iproute2):\n" + lines);
}

bool put(const char* path, const std::string& text) {
  const int file = ::open(path, O_WRONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool written = ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::close(file);
  return written;
}

/// A process that is not root makes itself root of a user namespace of its own, with mounts and a
/// network of its own; children inherit it.
Status become_root() {
  if (::geteuid() == 0) return {};
  const std::string user = std::to_string(::geteuid());
  const std::string group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS) != 0) {
    return Status(Code::unsupported,
                  "hosts as network namespaces need root, or a system that lets users make "
                  "namespaces: unshare: " +
                      errno_text(errno));
  }
  if (!put("/proc/self/setgroups", "deny") || !put("/proc/self/uid_map", "0 " + user + " 1") ||
      !put("/proc/self/gid_map", "0 " + group + " 1") ||
      ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", "/run", "tmpfs", 0, nullptr) != 0) {
    return Status(Code::unsupported,
                  "a user namespace for hosts as network namespaces could not be set up: " +
                      errno_text(errno));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<NetworkNamespaces>> NetworkNamespaces::create(int hosts) {
  if (Status root = become_root(); !root) return root;
  static std::atomic<int> made{0};
  // Short: an interface's name has at most 15 characters.
  const std::string prefix =
      "m" + std::to_string(::getpid()) + "n" + std::to_string(made.fetch_add(1)) + "h";
  std::unique_ptr<NetworkNamespaces> net(new NetworkNamespaces(prefix, hosts));
  std::string lines = "netns add " + net->hub() + "\n";
  for (int host = 0; host < hosts; ++host) lines += "netns add " + net->name(host) + "\n";
  if (Status added = ip("", lines); !added) return added;
  lines = "link add bridge0 type bridge\nlink set bridge0 up\n";
  for (int host = 0; host < hosts; ++host) {
    const std::string port = "port" + std::to_string(host);
    lines += "link add " + port + " type veth peer name " + interface() + " netns " +
             net->name(host) + "\n";
    lines += "link set " + port + " master bridge0 up\n";
  }
  if (Status joined = ip(net->hub(), lines); !joined) return joined;
  for (int host = 0; host < hosts; ++host) {
    const std::string wire = interface();
    // nodad: the address is usable at once.
    lines = "link set lo up\nlink set " + wire + " up\naddr add " + net->address(host) +
            "/24 dev " + wire + "\naddr add " + net->address_v6(host) + "/64 dev " + wire +
            " nodad\n";
    if (Status addressed = ip(net->name(host), lines); !addressed) return addressed;
  }
  return net;
}

NetworkNamespaces::~NetworkNamespaces() {
  std::string lines = "netns del " + hub() + "\n";
  for (int host = 0; host < hosts_; ++host) lines += "netns del " + name(host) + "\n";
  static_cast<void>(ip("", lines));
}

Status NetworkNamespaces::enter(int host) const {
  const std::string path = "/var/run/netns/" + name(host);
  const Descriptor space(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!space || ::setns(space.get(), CLONE_NEWNET) != 0) {
    return Status(Code::unsupported,
                  "cannot enter the network namespace " + path + ": " + errno_text(errno));
  }
  return {};
}

std::string NetworkNamespaces::address(int host) const {
  return "10.77.0." + std::to_string(host + 1);
}
std::string NetworkNamespaces::address_v6(int host) const {
  return "fd77::" + std::to_string(host + 1);
}

Status NetworkNamespaces::set_plugged(int host, bool plugged) const {
  return ip(hub(), "link set port" + std::to_string(host) + (plugged ? " up\n" : " down\n"));
}

Status NetworkNamespaces::limit(int host, const std::string& rate) const {
  const std::string command = "tc -n " + name(host) + " qdisc add dev " + interface() +
                              " root tbf rate " + rate + " burst 256kb latency 50ms 2>&1";
  if (std::system(command.c_str()) == 0) return {};
  return Status(Code::unsupported, "tc could not do this: " + command);
}

}  // namespace muster::testing
