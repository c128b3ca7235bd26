// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/socket_connector.h"

#include <net/if.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/host_barrier.h"
#include "core/security/handshake.h"
#include "core/shm/region_layout.h"
#include "core/transport/connect/acceptor.h"
#include "core/transport/link/link_protocol.h"
#include "core/tunables/tunables.h"
#include "core/wait/topology.h"

namespace muster::transport {
namespace {

/// Up to this many ranks of a host send barriers before they sleep even when oversubscribed.
constexpr std::size_t kFewSleepers = fixed::kWideGroup;

// The other processes are opened only after the rendezvous, because on a full host the ranks
// already compete for the cores during it.
constexpr Duration kWatchAfter = std::chrono::milliseconds(20);  // limit: of starting a job

/// "rank 3", or "ranks 0, 2, 3".
std::string some_of(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kShown ? text + " and " + std::to_string(ranks.size() - kShown) + " more"
                               : text;
}

/// " (eth0)", or nothing where no interface has the address.
std::string interface_of(const SocketAddress& address) {
  const std::unique_ptr<struct if_nameindex, void (*)(struct if_nameindex*)> all(
      ::if_nameindex(), ::if_freenameindex);
  for (const auto* each = all.get(); each != nullptr && each->if_name != nullptr; ++each) {
    const auto found = interface_addresses(each->if_name);
    const auto is_it = [&](const SocketAddress& other) { return other.host() == address.host(); };
    if (found && std::any_of(found->begin(), found->end(), is_it))
      return std::string(" (") + each->if_name + ")";
  }
  return {};
}

std::uint64_t random_number() {
  std::uint64_t value = 0;
  fill_random(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

/// The hash of the formats that both ends of a link or a region must share.
std::uint64_t build_hash() {
  const auto hash = short_hash("muster transport: frames " + std::to_string(kFrameVersion) +
                               ", region " + std::to_string(shm::kRegionVersion) + ", contact " +
                               std::to_string(kContactVersion));
  std::uint64_t value = 0;
  std::memcpy(&value, hash.data(), sizeof value);
  return value | 1;  // 0 would not be compared
}

}  // namespace

std::unique_ptr<Connector> make_socket_connector(ConnectorOptions options, Secret secret) {
  return std::make_unique<SocketConnector>(std::move(options), std::move(secret));
}

// ---- meeting

Result<std::string> SocketConnector::own_address(TimePoint deadline) {
  PeerAddress self;
  if (Status described = describe_this_process(self); !described) return described;
  self.host_label = options_.host_label;
  self.secret_kind = secret_.kind();
  self.shared_memory = options_.shared_memory;
  self.nonce = random_number();
  const std::uint64_t name_parts[2] = {random_number(), random_number()};
  self.local_name = "muster-" + std::to_string(name_parts[0]) + "-" + std::to_string(name_parts[1]);

  Handshake::Hello hello;
  hello.role = options_.role;
  hello.rank = options_.rank;
  hello.world_size = options_.world_size;
  hello.job = options_.job;
  hello.build = build_hash();
  hello.note = self.nonce;
  hello.payloads = options_.payloads;

  if (Status made = wakeups_.open(); !made) return made;
  // Without a secret no process beyond this host can be a rank.
  const bool others_may_come = secret_.kind() != Secret::Kind::host;
  auto addresses = addresses_to_listen_on(options_, others_may_come, deadline);
  if (!addresses) return addresses.status();
  for (SocketAddress& address : *addresses) {
    auto any_port = SocketAddress::numeric(address.host(), 0);
    if (!any_port) return any_port.status();
    address = *any_port;
  }
  links_ = std::make_unique<SocketStreams>(hello, secret_);
  if (Status listening = links_->listen(*addresses, !options_.interfaces.empty()); !listening)
    return listening;
  self.addresses = links_->addresses();
  if (Status watched = wakeups_.watch(links_->descriptor()); !watched) return watched;
  if (Status listening = meeting_.listen(self.local_name, hello); !listening) return listening;
  return encode(self);
}

Result<std::string> SocketConnector::meet(std::span<const std::string> contacts,
                                          TimePoint deadline) {
  auto book = PeerBook::decode(contacts, options_.rank, options_.world_size);
  if (!book) return book.status();
  book_ = std::move(*book);
  if (Status checked = book_.check(secret_.kind()); !checked) return checked;
  const auto verdict = meeting_.meet(deadline);
  if (!verdict) return verdict.status();
  return encode(*verdict);
}

Status SocketConnector::settle(std::span<const std::string> texts, ConnectorEvents& events) {
  events_ = &events;
  std::vector<MeetingVerdict> verdicts;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    auto verdict = decode_verdict(texts[static_cast<std::size_t>(rank)], rank);
    if (!verdict) return verdict.status();
    verdicts.push_back(std::move(*verdict));
  }
  auto region = meeting_.settle(verdicts);
  if (!region) return region.status();
  region_ = std::move(*region);
  hosts_ = book_.hosts(verdicts);
  cores_ = book_.cores(hosts_);
  if (Status watched = watch_local_processes(); !watched) return watched;
  if (meeting_.server().listens()) {
    if (Status watched = wakeups_.watch(meeting_.server().descriptor()); !watched) return watched;
  }
  std::vector<SocketStreams::LinkPeer> peers;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const PeerAddress& contact = book_.of(rank);
    peers.push_back({book_.name(rank), contact.addresses, contact.nonce});
  }
  links_->settle(std::move(peers), events);
  if (logs(LogLevel::info) && options_.world_size > 1)
    log(LogLevel::info, describe_links(verdicts[static_cast<std::size_t>(options_.rank)]));
  choose_barriers();
  mailbox().pid.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_release);
  return {};
}

Status SocketConnector::watch_local_processes() {
  dead_.assign(hosts_.size(), false);
  if (Status open = processes_.open(); !open) return open;
  if (Status watched = wakeups_.watch(processes_.descriptor()); !watched) return watched;
  const TimePoint from = steady_clock().now() + kWatchAfter;
  const int host = hosts_[static_cast<std::size_t>(options_.rank)];
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const PeerAddress& other = book_.of(rank);
    if (hosts_[static_cast<std::size_t>(rank)] == host && book_.is_process_here(rank))
      processes_.watch(rank, other.pid, other.start_time, from);
  }
  return {};
}

ProcessState SocketConnector::process_state(int rank) {
  const auto host_of = [this](int of) { return hosts_[static_cast<std::size_t>(of)]; };
  if (host_of(rank) != host_of(options_.rank)) return ProcessState::unknown;
  const PeerAddress& other = book_.of(rank);
  if (same_process(book_.mine(), other)) return ProcessState::running;
  return book_.is_process_here(rank) ? muster::process_state(other.pid, other.start_time)
                                     : ProcessState::unknown;
}

std::string SocketConnector::end_of_process(int rank) {
  if (!book_.is_process_here(rank)) return {};
  const PeerAddress& other = book_.of(rank);
  const auto signal = ending_signal(other.pid, other.start_time);
  if (!signal) return {};
  // The common case reads the same whether or not the parent has collected the status already.
  if (*signal == 0 || *signal == SIGKILL) return "has ended";
  const char* name = ::sigabbrev_np(*signal);
  return "has died (" +
         (name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(*signal)) + ")";
}

/// Many oversubscribed ranks sleep often, and each barrier would interrupt all of them.
void SocketConnector::choose_barriers() {
  if (!region_) return;
  const std::size_t ranks = region_->region().ranks().size();
  if ((ranks_per_core(ranks, cores_) == 1 || ranks <= kFewSleepers) && takes_host_barriers())
    mailbox().sends_barriers.store(1, std::memory_order_relaxed);
}

std::string SocketConnector::describe_links(const MeetingVerdict& own) const {
  std::vector<int> here, elsewhere;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (rank == options_.rank) continue;
    (region_ && region_->place_of(rank) >= 0 ? here : elsewhere).push_back(rank);
  }
  std::string text = "links";
  if (!here.empty())
    text += " to " + some_of(here) + " through shared memory of host " + book_.mine().host_name +
            " (" + std::to_string(here.size() + 1) + " ranks on " + std::to_string(cores_) +
            (cores_ == 1 ? " core)" : " cores)");
  if (elsewhere.empty()) return text;
  text += (here.empty() ? " to " : "; to ") + some_of(elsewhere) + " over TCP";
  if (!own.reason.empty()) text += " (" + own.reason + ")";
  text += ", " + describe(options_.payloads);
  for (const auto& address : links_->addresses())
    text += (&address == &links_->addresses().front() ? ", from " : " and ") + address.text() +
            interface_of(address);
  return text;
}

shm::Mailbox& SocketConnector::mailbox() {
  if (!region_) return own_mailbox_;
  return region_->region().mailbox(region_->region().local_rank());
}

// ---- afterwards

void SocketConnector::connect(int peer, TimePoint deadline) {
  if (mark_.forked() || peer < 0 || peer >= options_.world_size || peer == options_.rank) return;
  if (const int place = region_ ? region_->place_of(peer) : -1; place >= 0) {
    region_->ask_for(place);
  } else {
    links_->connect(peer, deadline);
  }
  wakeups_.nudge();
  next_look_ = {};
}

bool SocketConnector::poll_region(TimePoint now) {
  if (!region_) return false;
  bool moved = region_->poll(*events_);
  if (now < next_look_) return moved;
  region_->look_for_leavers([&](int rank) {
    if (dead_[static_cast<std::size_t>(rank)]) return;
    report_death(rank, Status(Code::peer_failed,
                              book_.name(rank) + " has left the job: it says so itself", {rank}));
    moved = true;
  });
  return moved;
}

bool SocketConnector::poll_descriptors(TimePoint now) {
  bool moved = wakeups_.drain();
  moved |= processes_.poll(now, [this](int rank, ProcessWatch::Seen seen) {
    const std::string who = book_.name(rank);
    if (seen == ProcessWatch::Seen::unknown)
      return log(LogLevel::info,
                 "the process of " + who +
                     " cannot be watched; its end will show in its connections only");
    const bool watched = seen == ProcessWatch::Seen::ended;
    const std::string end = end_of_process(rank);
    const std::string text = watched ? (end.empty() ? "has ended" : end) + ": its process is gone"
                                     : "had ended before this rank could watch it";
    report_death(rank, Status(Code::peer_failed, who + " " + text, {rank}));
  });
  if (meeting_.server().listens()) moved |= meeting_.server().poll(now);
  return links_->poll(now) || moved;
}

void SocketConnector::report_death(int rank, Status evidence) {
  if (dead_[static_cast<std::size_t>(rank)]) return;
  dead_[static_cast<std::size_t>(rank)] = true;
  links_->give_up(rank, evidence);
  events_->on_death(rank, std::move(evidence));
}

bool SocketConnector::poll(TimePoint now) {
  if (events_ == nullptr || mark_.forked()) return false;
  bool moved = poll_region(now);
  if (now < next_look_ && now < next_timer()) return moved;
  // Looking at the descriptors is a system call.
  next_look_ = now + tunables().round_trip;
  if (wakeups_.any_ready() || next_timer() <= now) moved |= poll_descriptors(now);
  return moved;
}

TimePoint SocketConnector::next_timer() const {
  if (events_ == nullptr) return TimePoint::max();
  if (region_ && region_->has_asked()) return TimePoint{};
  const TimePoint next = std::min(links_->next_timer(), processes_.next_timer());
  const LocalServer& server = meeting_.server();
  return server.listens() ? std::min(next, server.next_timer()) : next;
}

}  // namespace muster::transport
