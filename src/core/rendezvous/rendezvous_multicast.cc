// SPDX-License-Identifier: BSD-3-Clause
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/threads/thread_start.h"
#include "core/base/time/clock.h"
#include "core/net/socket_address.h"
#include "core/net/this_host.h"
#include "core/rendezvous/join.h"
#include "core/security/secret.h"
#include "core/store/announcement.h"
#include "core/store/factory.h"
#include "core/store/request.h"

// Every process announces itself to the group again and again, signed with the job's secret: a
// number of its own, the rank that it was given (if any), what it has heard of the others, and,
// once it has opened the store, its address. A process counts only peers that have recently heard
// it (announcement.h), which recordings of earlier runs have not. When all are known, the process
// with the smallest number opens the store, and the others connect to it. All keep announcing until
// they have met, so that a late process hears all of them.

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kInterval = milliseconds(50);  // limit: load of a network
constexpr Duration kForgotten = seconds(3);       // a process not heard for this long has given up
constexpr Duration kOwnPause = seconds(1);  // a look that is so late: this process stood still
constexpr std::uint32_t kWindow = kForgotten / kInterval;

/// The processes of this host meet at this IPv4 group instead of an IPv6 one: `lo` has no route for
/// IPv6 multicast, but carries that of IPv4.
SocketAddress group_within_host(const SocketAddress& group) {
  const auto hash = short_hash(group.host());
  std::string host = "239";
  for (std::size_t i = 0; i < 3; ++i)
    host += "." + std::to_string(std::to_integer<unsigned>(hash[i]));
  return *SocketAddress::numeric(host, group.port());
}

/// A socket that has joined a group on some interfaces.
class GroupSocket {
 public:
  static Result<GroupSocket> open(const SocketAddress& group,
                                  std::span<const GroupInterface> interfaces) {
    GroupSocket made(group);
    const auto failed = [&](const std::string& what) {
      return Status(Code::network, "cannot " + what + " the multicast group " + group.text() +
                                       ": " + errno_text(errno));
    };
    made.socket_ =
        Descriptor(::socket(group.family(), SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!made.socket_) return failed("make a socket for");
    const int on = 1;  // all processes of a host listen on one port
    if (::setsockopt(made.socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
      return failed("share the port of");
    if (::bind(made.socket_.get(), group.raw(), group.length()) != 0) return failed("listen to");
    for (const GroupInterface& each : interfaces) {
      if (!made.enter(each.index)) continue;
      made.interfaces_.push_back(each.index);
      made.reachable_at_ = each.address.host();
    }
    if (made.interfaces_.empty()) return failed("join");
    return made;
  }

  int descriptor() const { return socket_.get(); }
  /// This host's address on the interface that reaches furthest.
  const std::string& reachable_at() const { return reachable_at_; }

  /// Success if the packet has left on one interface at least. A packet that gets lost later does
  /// not matter: the next one follows soon.
  Status send(std::string_view packet) const {
    int sent = 0, error = 0;
    for (const unsigned index : interfaces_) {
      if (leave_by(index) && ::sendto(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL,
                                      group_.raw(), group_.length()) >= 0) {
        ++sent;
      } else {
        error = errno;
      }
    }
    if (sent > 0) return {};
    return Status(Code::network,
                  "nothing can be sent to " + group_.text() + ": " + errno_text(error));
  }

 private:
  explicit GroupSocket(const SocketAddress& group) : group_(group) {}
  bool leave_by(unsigned index) const {
    if (group_.family() == AF_INET) {
      ip_mreqn out{};
      out.imr_ifindex = static_cast<int>(index);
      return ::setsockopt(socket_.get(), IPPROTO_IP, IP_MULTICAST_IF, &out, sizeof out) == 0;
    }
    return ::setsockopt(socket_.get(), IPPROTO_IPV6, IPV6_MULTICAST_IF, &index, sizeof index) == 0;
  }
  bool enter(unsigned index) const {
    if (group_.family() == AF_INET) {
      ip_mreqn request{};
      request.imr_multiaddr = reinterpret_cast<const sockaddr_in*>(group_.raw())->sin_addr;
      request.imr_ifindex = static_cast<int>(index);
      return ::setsockopt(socket_.get(), IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof request) ==
             0;
    }
    ipv6_mreq request{};
    request.ipv6mr_multiaddr = reinterpret_cast<const sockaddr_in6*>(group_.raw())->sin6_addr;
    request.ipv6mr_interface = index;
    return ::setsockopt(socket_.get(), IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, sizeof request) ==
           0;
  }

  SocketAddress group_;
  Descriptor socket_;
  std::vector<unsigned> interfaces_;
  std::string reachable_at_;
};

/// The sockets by which this process meets the others: one for IPv4; for IPv6 also one for the
/// processes of this host.
struct GroupSockets {
  std::vector<GroupSocket> all;
  Status trouble;  ///< why one of them could not be opened; the others still serve
  /// Where the processes that may come reach this host's store.
  std::string reachable_at;

  static Result<GroupSockets> open(const SocketAddress& group, bool others_may_come) {
    GroupSockets made;
    const auto add = [&](const SocketAddress& at, bool beyond_host) {
      const auto interfaces = interfaces_towards(at, beyond_host);
      if (!interfaces) return interfaces.status();
      auto socket = GroupSocket::open(at, *interfaces);
      if (!socket) return socket.status();
      if (made.reachable_at.empty()) made.reachable_at = socket->reachable_at();
      made.all.push_back(std::move(*socket));
      return Status();
    };
    const bool is_ipv4 = group.family() == AF_INET;
    if (is_ipv4 || others_may_come) made.trouble = add(group, others_may_come);
    if (!is_ipv4) {
      const Status here = add(group_within_host(group), false);
      if (made.trouble.ok()) made.trouble = here;
    }
    if (made.all.empty()) return made.trouble;
    return made;
  }
};

/// "fe80::1%eth0" without the scope, which is meaningful on its own host only.
std::string without_scope(const std::string& host) { return host.substr(0, host.find('%')); }

/// Announces and listens on a thread of its own until it is destroyed.
class Crier {
 public:
  struct MulticastPeer {
    Announcement said;
    std::string scope;  ///< of the interface that it was heard on: "%eth0", or nothing
    TimePoint heard;
  };
  using Peers = std::map<std::uint64_t, MulticastPeer>;

  /// `begun` is when the deadline was asked for: a pause counts from then on.
  Crier(GroupSockets sockets, Announcement self, const GroupHash& group, const Secret& secret,
        TimePoint begun)
      : sockets_(std::move(sockets)),
        self_(std::move(self)),
        group_(group),
        secret_(secret),
        wakes_(begun) {}
  ~Crier() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Status start() {
    auto thread = start_thread("the thread that announces this process to the multicast group",
                               [this] { run(); });
    if (!thread.ok()) return thread.status();
    thread_ = std::move(*thread);
    return {};
  }

  void open_store(const std::string& host, std::uint16_t port) {
    const std::lock_guard lock(mutex_);
    self_.store_host = without_scope(host);
    self_.store_port = port;
  }

  /// Why some or all of the others may not hear this process, or success.
  Status trouble() {
    const std::lock_guard lock(mutex_);
    return send_failure_.ok() ? sockets_.trouble : send_failure_;
  }

  /// Waits until `enough` returns true for the recently heard processes, including this one. The
  /// time during which this process stands still, in the wait or before it, counts for nobody, and
  /// puts `deadline` off. On the thread that made this.
  template <class Condition>
  bool wait(TimePoint& deadline, Peers& peers, const Condition& enough) {
    OwnPauses pauses;
    std::unique_lock lock(mutex_);
    for (;;) {
      const TimePoint now = steady_clock().now();
      const Duration late = now - std::exchange(wakes_, now);
      if (late <= kOwnPause) {
        pauses.reset();
      } else if (pauses.excuse()) {
        for (auto& entry : peers_) entry.second.heard = std::min(entry.second.heard + late, now);
        if (deadline != TimePoint::max()) deadline += late;
      }
      std::erase_if(peers_,
                    [&](const auto& entry) { return entry.second.heard + kForgotten < now; });
      peers = peers_;
      peers[self_.id] = {self_, {}, now};
      if (enough(peers)) return true;
      if (now >= deadline) return false;
      wakes_ = std::min(deadline, now + kForgotten / 4);
      changed_.wait_until(lock, wakes_);
    }
  }

 private:
  void run() {
    TimePoint next = steady_clock().now();
    std::vector<pollfd> waiting;
    for (const GroupSocket& each : sockets_.all) waiting.push_back({each.descriptor(), POLLIN, 0});
    while (!stop_) {
      if (steady_clock().now() >= next) {
        announce();
        next = steady_clock().now() + kInterval;
      }
      // After a signal, or any error, the sockets are looked at again in the next round.
      if (::poll(waiting.data(), waiting.size(),
                 static_cast<int>(kInterval / milliseconds(1) / 2)) <= 0)
        continue;
      for (const pollfd& each : waiting) {
        if (each.revents != 0) hear(each.fd);
      }
    }
  }

  void announce() {
    const std::string packet = next_packet();
    Status failure;
    for (const GroupSocket& each : sockets_.all) {
      if (Status sent = each.send(packet); !sent) failure = std::move(sent);
    }
    const std::lock_guard lock(mutex_);
    send_failure_ = std::move(failure);
  }

  std::string next_packet() {
    const std::lock_guard lock(mutex_);
    ++self_.count;
    self_.heard = heard_.next(steady_clock().now());
    return encode(self_, group_, secret_);
  }

  void hear(int descriptor) {
    char packet[kAnnouncementBytes + 1];
    sockaddr_storage name{};
    socklen_t length = sizeof name;
    const ssize_t n = ::recvfrom(descriptor, packet, sizeof packet, 0,
                                 reinterpret_cast<sockaddr*>(&name), &length);
    if (n < 0) return;  // nothing there after all, or the next round says it again
    const auto said = decode_announcement({packet, static_cast<std::size_t>(n)}, group_, secret_);
    if (!said || said->id == self_.id) return;
    const std::string from = SocketAddress(reinterpret_cast<const sockaddr*>(&name), length).host();
    const std::lock_guard lock(mutex_);
    const TimePoint now = steady_clock().now();
    heard_.note(said->id, said->count, now);
    // Up to here the packet may be a recording. A sender that has recently heard this process is
    // not.
    if (!is_fresh(*said, self_.id, self_.count, kWindow)) return;
    MulticastPeer& peer = peers_[said->id];
    peer.heard = now;
    if (said->count < peer.said.count) return;
    peer.said = *said;
    const auto scope = from.find('%');
    if (scope != std::string::npos) peer.scope = from.substr(scope);
    changed_.notify_all();
  }

  const GroupSockets sockets_;
  // Guards what changes below, but for `stop_`. Packets are sent and received without it.
  std::mutex mutex_;
  std::condition_variable changed_;
  Announcement self_;
  const GroupHash group_;
  const Secret secret_;
  Status send_failure_;            // of the latest announcement
  HeardCounts heard_{kForgotten};  // signed, but possibly old
  Peers peers_;                    // processes that have recently heard this one
  std::atomic<bool> stop_ = false;
  std::thread thread_;
  TimePoint wakes_;  // when the thread that waits should look again; its own, without the lock
};

/// The address of a process's store. A link-local address needs this host's name of the interface.
std::string address_of(const Crier::MulticastPeer& peer) {
  const std::string& host = peer.said.store_host;
  return host.starts_with("fe80:") ? host + peer.scope : host;
}

/// Given ranks are kept. The other processes get the free ranks in the order of their numbers, the
/// same on every process.
int rank_of(std::uint64_t id, const Crier::Peers& peers, int world_size) {
  std::vector<bool> taken(static_cast<std::size_t>(world_size), false);
  for (const auto& [each, peer] : peers) {
    if (peer.said.rank >= 0 && peer.said.rank < world_size)
      taken[static_cast<std::size_t>(peer.said.rank)] = true;
  }
  std::size_t next = 0;
  for (const auto& [each, peer] : peers) {
    int rank = peer.said.rank;
    if (rank < 0) {
      while (next < taken.size() && taken[next]) ++next;
      rank = static_cast<int>(next++);
    }
    if (each == id) return rank;
  }
  return -1;
}

Status incomplete(const Crier::Peers& peers, const MeetingOptions& options, const Status& trouble) {
  std::vector<int> missing;
  missing.reserve(static_cast<std::size_t>(options.world_size));
  int given = 0;
  std::string sizes;
  for (int rank = 0; rank < options.world_size; ++rank) missing.push_back(rank);
  for (const auto& [id, peer] : peers) {
    if (peer.said.rank >= 0) ++given;
    std::erase(missing, peer.said.rank);
    if (peer.said.world_size != options.world_size)
      sizes = "; one of them expects a world of " + std::to_string(peer.said.world_size);
  }
  const bool all_given = given == static_cast<int>(peers.size());
  return Status(
      Code::timed_out,
      cannot_join(options.rank, options) + ": " + std::to_string(peers.size()) + " of " +
          std::to_string(options.world_size) + " processes were heard in time" +
          (all_given ? ", missing: " + listed(missing) : std::string()) + sizes +
          (trouble.ok() ? std::string("; does the network between the hosts carry multicast?")
                        : "; " + trouble.message()),
      all_given ? missing : std::vector<int>());
}

}  // namespace

Result<Rendezvous> rendezvous_by_multicast(const std::string& host, std::uint16_t port,
                                           MeetingOptions options) {
  const TimePoint begun = steady_clock().now();
  const auto secret = Secret::from_environment();
  if (!secret) return secret.status();
  const bool this_host_only = secret->kind() == Secret::Kind::host;
  auto sockets = GroupSockets::open(*SocketAddress::numeric(host, port), !this_host_only);
  if (!sockets) return sockets.status().with_context(cannot_join(options.rank, options));
  const std::string own_host = this_host_only ? "localhost" : sockets->reachable_at;
  Announcement self;
  fill_random(std::as_writable_bytes(std::span(&self.id, 1)));
  self.rank = options.rank;
  self.world_size = options.world_size;
  Crier crier(std::move(*sockets), self, short_hash(options.group_name), *secret, begun);
  if (Status started = crier.start(); !started) return started;

  Crier::Peers peers;
  const bool all = crier.wait(options.deadline, peers, [&](const Crier::Peers& heard) {
    return heard.size() == static_cast<std::size_t>(options.world_size);
  });
  if (!all) return incomplete(peers, options, crier.trouble());
  options.rank = rank_of(self.id, peers, options.world_size);
  const std::uint64_t first = peers.begin()->first;

  TcpStoreOptions store_options;
  store_options.secret = *secret;
  store_options.timeout = time_left(steady_clock(), options.deadline);
  store_options.is_server = first == self.id;
  if (store_options.is_server) {
    store_options.host = own_host;
    store_options.port = 0;
  } else {
    const auto opened = [&](const Crier::Peers& heard) {
      return heard.contains(first) && heard.at(first).said.store_port != 0;
    };
    if (!crier.wait(options.deadline, peers, opened)) {
      return Status(Code::timed_out, cannot_join(options.rank, options) +
                                         ": all processes were heard, but the one that opens the "
                                         "store did not say where in time");
    }
    const Crier::MulticastPeer& server = peers.at(first);
    store_options.host = this_host_only ? "localhost" : address_of(server);
    store_options.port = server.said.store_port;
  }
  const auto store = make_tcp_store(store_options);
  if (!store) return store.status().with_context(cannot_join(options.rank, options));
  if (store_options.is_server) crier.open_store(own_host, (*store)->port());
  auto joined = join(*store, options);
  if (joined) joined->host = (*store)->host();
  return joined;
}

}  // namespace muster::store
