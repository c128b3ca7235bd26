#include "muster/transport/socket_connector.h"

#include <net/if.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "muster/base/host_barrier.h"
#include "muster/base/log.h"
#include "muster/base/thread_start.h"
#include "muster/shm/arena.h"
#include "muster/transport/core_sharing.h"
#include "muster/transport/local_socket.h"

namespace muster::transport {
namespace {

/// So few ranks of a host send barriers before they sleep also where they share cores.
constexpr std::size_t kFewSleepers = 16;

// A pass that finds nothing in memory looks at the descriptors no more often than this: it is a
// system call.
constexpr Duration kLookInterval = std::chrono::microseconds(50);
// The others' processes are looked for when they have come through their meeting: the ranks of a
// full host keep each other from it enough.
constexpr Duration kWatchAfter = std::chrono::milliseconds(20);

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

/// Of what both ends of a link or a region must share.
std::uint64_t build_hash() {
  const auto hash = short_hash("muster transport: frames 2, region 2, contact 2");
  std::uint64_t value = 0;
  std::memcpy(&value, hash.data(), sizeof value);
  return value | 1;  // 0 would not be compared
}

}  // namespace

std::unique_ptr<Connector> make_socket_connector(ConnectorOptions options, Secret secret) {
  return std::make_unique<SocketConnector>(std::move(options), std::move(secret));
}

SocketConnector::SocketConnector(ConnectorOptions options, Secret secret)
    : options_(std::move(options)), secret_(std::move(secret)) {}

SocketConnector::~SocketConnector() {
  if (mark_.forked()) {
    if (server_.joinable()) server_.detach();  // it runs in the parent
    return;
  }
  stop_serving();
}

Status SocketConnector::watch(int descriptor) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = descriptor;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) == 0) return {};
  return Status(Code::exhausted, "cannot watch a descriptor: " + errno_text(errno));
}

Status SocketConnector::make_epoll() {
  epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
  nudge_ = GuardedDescriptor(Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
  if (!epoll_ || !nudge_)
    return Status(Code::exhausted, "cannot make the descriptors to wait on: " + errno_text(errno));
  return watch(nudge_.get());
}

// ---- 1. contact ----

/// The address from which this host reaches the world, if there is a way to it. Nothing is sent:
/// the targets are documentation's.
std::optional<SocketAddress> address_of_default_route() {
  for (const char* anywhere : {"198.51.100.1", "2001:db8::1"}) {
    const auto target = SocketAddress::numeric(anywhere, 9);
    if (!target) continue;
    const auto address = address_towards(*target);
    if (address && !address->is_loopback()) return *address;
  }
  return {};
}

/// Nothing listens where it was not asked to: the interfaces named, else the address that routes to
/// the store, else, where that is a file that other hosts may share, the one that routes to the
/// world, else loopback.
Result<std::vector<SocketAddress>> SocketConnector::addresses_to_listen_on(
    TimePoint deadline) const {
  std::vector<SocketAddress> addresses;
  for (const std::string& name : options_.interfaces) {
    auto found = interface_addresses(name);
    if (!found) return found.status().with_context("choosing the network interfaces for links");
    addresses.push_back(found->front());
  }
  if (!addresses.empty()) return addresses;
  // Without a secret nobody beyond this host can be a rank.
  const bool others_may_come = secret_.kind() != Secret::Kind::host;
  if (others_may_come && options_.any_host && options_.towards.empty()) {
    if (const auto address = address_of_default_route())
      return std::vector<SocketAddress>{*SocketAddress::numeric(address->host(), 0)};
  }
  if (others_may_come && !options_.towards.empty()) {
    auto target = resolve(options_.towards, 9, deadline);
    if (!target)
      return target.status().with_context(
          "choosing the address for links, the one that routes to the store");
    for (const SocketAddress& each : *target) {
      if (auto address = address_towards(each))
        return std::vector<SocketAddress>{*SocketAddress::numeric(address->host(), 0)};
    }
    return address_towards(target->front())
        .status()
        .with_context("choosing the address for links, the one that routes to the store");
  }
  for (const char* loopback : {"127.0.0.1", "::1"}) {
    const auto address = SocketAddress::numeric(loopback, 0);
    if (address.ok() && listen_on(*address, 1).ok()) return std::vector<SocketAddress>{*address};
  }
  return Status(Code::network,
                "this host has no loopback address to listen on (is the interface lo up?)");
}

Result<std::string> SocketConnector::contact(TimePoint deadline) {
  if (Status described = describe_this_process(self_); !described) return described;
  self_.host_label = options_.host_label;
  self_.secret_kind = secret_.kind();
  self_.shared_memory = options_.shared_memory;
  self_.nonce = random_number();
  const std::uint64_t name_parts[2] = {random_number(), random_number()};
  self_.local_name =
      "muster-" + std::to_string(name_parts[0]) + "-" + std::to_string(name_parts[1]);

  Handshake::Hello hello;
  hello.role = Handshake::Role::link;
  hello.rank = options_.rank;
  hello.world_size = options_.world_size;
  hello.job = options_.job;
  hello.build = build_hash();
  hello.note = self_.nonce;
  local_hello_ = hello;
  local_hello_.role = Handshake::Role::region;

  if (Status made = make_epoll(); !made) return made;
  auto addresses = addresses_to_listen_on(deadline);
  if (!addresses) return addresses.status();
  for (SocketAddress& address : *addresses) {
    auto any_port = SocketAddress::numeric(address.host(), 0);
    if (!any_port) return any_port.status();
    address = *any_port;
  }
  links_ = std::make_unique<SocketLinks>(hello, secret_);
  if (Status listening = links_->listen(*addresses, !options_.interfaces.empty()); !listening)
    return listening;
  self_.addresses = links_->addresses();
  if (Status watched = watch(links_->descriptor()); !watched) return watched;

  if (options_.shared_memory) {
    auto listener = listen_locally(self_.local_name);
    if (!listener) return listener.status();
    ReceptionOptions reception;
    reception.hello = local_hello_;
    reception.admit = is_same_user;
    reception.arrived = [this](GuardedDescriptor socket, const Handshake::Peer& peer) {
      answer(std::move(socket), peer);
    };
    local_ = std::make_unique<Reception>(std::move(reception), secret_);
    if (Status served = local_->serve(std::move(*listener)); !served) return served;
  }
  return encode(self_);
}

/// A local rank that has proved the secret asks for memory.
void SocketConnector::answer(GuardedDescriptor socket, const Handshake::Peer& peer) {
  switch (static_cast<Want>(peer.note)) {
    case Want::region: return answer_with(socket.get(), region_file_.get());
    case Want::arena: {
      const shm::Arena* const arena = shm::Arena::if_made();
      return answer_with(socket.get(), arena != nullptr ? arena->descriptor() : -1);
    }
  }
  answer_with(socket.get(), -1);
}

// ---- 2. meet ----

/// Whether `rank` can be reached from here at all, in time to say so in plain words.
Status SocketConnector::check_reachable(int rank) const {
  const Contact& other = contact_of(rank);
  // A label alone (of a test) makes no distance.
  if (mine().boot_id == other.boot_id && mine().network_namespace == other.network_namespace) {
    if (mine().user == other.user || secret_.kind() != Secret::Kind::host) return {};
    return Status(Code::refused,
                  name_of(rank, other) +
                      " is run by another user; without a secret only ranks of one user may meet: "
                      "set the same MUSTER_SECRET for "
                      "all ranks",
                  {rank});
  }
  if (secret_.kind() == Secret::Kind::host || other.secret_kind == Secret::Kind::host) {
    return Status(Code::refused,
                  name_of(rank, other) +
                      " runs on another host (or in another network namespace) than " +
                      name_of(options_.rank, mine()) +
                      ", and this job has no secret: set MUSTER_SECRET to the same text of at "
                      "least 16 characters for all ranks (or say "
                      "MUSTER_INSECURE=1 where the network is trusted)",
                  {rank});
  }
  const bool only_loopback = std::all_of(other.addresses.begin(), other.addresses.end(),
                                         [](const auto& each) { return each.is_loopback(); });
  if (!only_loopback) return {};
  return Status(Code::network,
                name_of(rank, other) + " listens on a loopback address only, which " +
                    name_of(options_.rank, mine()) +
                    " on another host cannot reach: give MASTER_ADDR a name or address that all "
                    "hosts can reach, or name the interface in "
                    "MUSTER_SOCKET_IFNAME",
                {rank});
}

Status SocketConnector::check_contacts() const {
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const Contact& other = contact_of(rank);
    if (other.addresses.size() != contact_of(0).addresses.size() || other.addresses.empty()) {
      return Status(Code::invalid_argument,
                    "the lists of network interfaces differ in length: " + name_of(rank, other) +
                        " listens on " + std::to_string(other.addresses.size()) + ", " +
                        name_of(0, contact_of(0)) + " on " +
                        std::to_string(contact_of(0).addresses.size()) +
                        "; MUSTER_SOCKET_IFNAME must name equally many on every rank",
                    {rank});
    }
    if (rank == options_.rank) continue;
    if (Status reachable = check_reachable(rank); !reachable) return reachable;
  }
  return {};
}

/// Ranks that may share memory with this one, itself included.
std::vector<int> SocketConnector::candidates() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (could_share_memory(mine(), contact_of(rank))) ranks.push_back(rank);
  }
  return ranks;
}

shm::RegionShape SocketConnector::shape_for(const std::vector<int>& ranks, std::size_t places,
                                            int maker) const {
  shm::RegionShape shape;
  shape.ranks = ranks;
  shape.ring_bytes = options_.ring_bytes;
  shape.segment_bytes = options_.segment_bytes;
  shape.places = places;
  shape.nonce = contact_of(maker).nonce;
  return shape;
}

Status SocketConnector::make_region(const std::vector<int>& ranks) {
  const shm::RegionShape shape = shape_for(ranks, ranks.size(), options_.rank);
  auto file = shm::make_memory_file("muster-region", shm::region_bytes(shape));
  if (!file) return file.status();
  auto mapping = shm::map_shared(file->get(), shm::region_bytes(shape));
  if (!mapping) return mapping.status();
  shm::lay_out_region((*mapping)->memory(), shape);
  region_mapping_ = std::move(*mapping);
  region_file_ = GuardedDescriptor(std::move(*file));
  return {};
}

Status SocketConnector::fetch_region(const std::vector<int>& ranks, TimePoint deadline) {
  const int maker = ranks.front();
  const shm::RegionShape shape = shape_for(ranks, ranks.size(), maker);
  const auto file =
      fetch_locally(contact_of(maker).local_name, Want::region, local_hello_, secret_, deadline);
  if (!file) return file.status();
  auto mapping = shm::map_shared(file->get(), shm::region_bytes(shape));
  if (!mapping) return mapping.status();
  if (Status checked = shm::check_region((*mapping)->memory(), shape); !checked) return checked;
  region_mapping_ = std::move(*mapping);
  return {};
}

Status SocketConnector::serve_locally() {
  stop_server_ = GuardedDescriptor(Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
  auto thread = start_thread(
      "the thread that hands the shared region to the other ranks of this host", [this] {
        for (;;) {
          std::array<pollfd, 2> waits{pollfd{local_->descriptor(), POLLIN, 0},
                                      pollfd{stop_server_.get(), POLLIN, 0}};
          const TimePoint now = steady_clock().now();
          const auto pause = std::clamp(local_->next_timer() - now, Duration::zero(),
                                        Duration(std::chrono::seconds(1)));
          ::poll(waits.data(), waits.size(),
                 static_cast<int>(
                     std::chrono::duration_cast<std::chrono::milliseconds>(pause).count()) +
                     1);
          if (waits[1].revents != 0) return;
          local_->poll(steady_clock().now());
        }
      });
  if (!thread.ok()) return thread.status();
  server_ = std::move(*thread);
  return {};
}

void SocketConnector::stop_serving() {
  if (!server_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_server_.get(), &one, sizeof one);
  server_.join();
  stop_server_.reset();
}

Result<std::string> SocketConnector::meet(std::span<const std::string> contacts,
                                          TimePoint deadline) {
  if (contacts.size() != static_cast<std::size_t>(options_.world_size)) {
    return Status(Code::invalid_argument, std::to_string(contacts.size()) +
                                              " contacts for a world of " +
                                              std::to_string(options_.world_size));
  }
  for (int rank = 0; rank < options_.world_size; ++rank) {
    auto contact = decode_contact(contacts[static_cast<std::size_t>(rank)], rank);
    if (!contact) return contact.status();
    book_.push_back(std::move(*contact));
  }
  if (Status checked = check_contacts(); !checked) return checked;

  const std::vector<int> ranks =
      options_.shared_memory ? candidates() : std::vector<int>{options_.rank};
  places_ = ranks.size();
  verdict_ = MeetingVerdict{};
  if (ranks.size() < 2) {
    verdict_.reason = options_.shared_memory ? "it is alone on its host" : "shared memory is off";
    return encode(verdict_);
  }
  const bool makes = ranks.front() == options_.rank;
  const Status mapped = makes ? make_region(ranks) : fetch_region(ranks, deadline);
  // Also where there is no region: the others' requests are answered by saying so.
  if (makes) {
    if (Status serves = serve_locally(); !serves) return serves;
  }
  if (mapped.code() == Code::timed_out) {
    return Status(Code::timed_out,
                  "meeting " + name_of(ranks.front(), contact_of(ranks.front())) +
                      " on this host: " + mapped.message(),
                  {ranks.front()});
  }
  verdict_.mapped = mapped.ok();
  verdict_.maker = ranks.front();
  verdict_.nonce = contact_of(ranks.front()).nonce;
  verdict_.reason = mapped.message();
  if (!mapped) {
    log(LogLevel::warning, "no memory is shared with " +
                               name_of(ranks.front(), contact_of(ranks.front())) +
                               ", sockets are used instead: " + mapped.message());
  }
  return encode(verdict_);
}

// ---- 3. settle ----

Status SocketConnector::open_settled_region(const std::vector<MeetingVerdict>& verdicts) {
  place_of_.assign(verdicts.size(), -1);
  std::vector<int> ranks;
  std::vector<Contact> contacts;
  const MeetingVerdict& own = verdicts[static_cast<std::size_t>(options_.rank)];
  for (std::size_t rank = 0; own.mapped && rank < verdicts.size(); ++rank) {
    if (!verdicts[rank].mapped || verdicts[rank].maker != own.maker ||
        verdicts[rank].nonce != own.nonce)
      continue;
    place_of_[rank] = static_cast<int>(ranks.size());
    ranks.push_back(static_cast<int>(rank));
    contacts.push_back(book_[rank]);
  }
  if (ranks.size() < 2) {
    place_of_.assign(verdicts.size(), -1);
    region_mapping_.reset();
    return {};
  }
  const int place = place_of_[static_cast<std::size_t>(options_.rank)];
  arenas_ = std::make_shared<LocalArenas>(place, ranks, contacts, local_hello_, secret_);
  auto region = shm::open_region(
      region_mapping_->memory(), shape_for(ranks, places_, own.maker), place, region_mapping_,
      [arenas = arenas_](int local_rank, std::uint64_t offset, std::size_t bytes) {
        return arenas->at(local_rank, offset, bytes);
      },
      [this](int local_rank) {
        return arenas_->ready(
            local_rank, [memory = region_mapping_, box = &region_->mailbox(region_->local_rank())] {
              box->wake();
            });
      },
      [this](int local_rank) -> std::shared_ptr<shm::ProcessEnd> {
        const Contact& other = contact_of(region_->ranks()[static_cast<std::size_t>(local_rank)]);
        const bool known = same_pids(mine(), other) && !same_process(mine(), other);
        return known ? std::make_shared<shm::ProcessEnd>(other.pid, other.start_time) : nullptr;
      });
  if (!region) return region.status();
  region_ = std::move(*region);
  linked_locally_.assign(ranks.size(), false);
  return {};
}

void SocketConnector::number_hosts(const std::vector<MeetingVerdict>& verdicts) {
  const auto together = [&](std::size_t a, std::size_t b) {
    if (verdicts[a].mapped && verdicts[b].mapped)
      return verdicts[a].maker == verdicts[b].maker && verdicts[a].nonce == verdicts[b].nonce;
    if (verdicts[a].mapped != verdicts[b].mapped || could_share_memory(book_[a], book_[b]))
      return false;
    return same_network_stack(book_[a], book_[b]);
  };
  hosts_.assign(verdicts.size(), -1);
  int next = 0;
  for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
    for (std::size_t earlier = 0; earlier < rank && hosts_[rank] < 0; ++earlier) {
      if (together(rank, earlier)) hosts_[rank] = hosts_[earlier];
    }
    if (hosts_[rank] < 0) hosts_[rank] = next++;
  }
}

/// Ranks that are bound to cores of their own have them all, together.
void SocketConnector::count_cores() {
  std::vector<const Contact*> here;
  for (std::size_t rank = 0; rank < hosts_.size(); ++rank) {
    if (hosts_[rank] == hosts_[static_cast<std::size_t>(options_.rank)])
      here.push_back(&book_[rank]);
  }
  cores_ = cores_together(here);
}

void SocketConnector::watch_local_processes() {
  const TimePoint from = steady_clock().now() + kWatchAfter;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const Contact& other = contact_of(rank);
    const bool here =
        hosts_[static_cast<std::size_t>(rank)] == hosts_[static_cast<std::size_t>(options_.rank)] &&
        same_pids(mine(), other);
    if (here && !same_process(mine(), other))
      processes_.watch(rank, other.pid, other.start_time, from);
  }
}

std::string SocketConnector::describe_links() const {
  std::vector<int> here, elsewhere;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (rank == options_.rank) continue;
    (place_of_[static_cast<std::size_t>(rank)] >= 0 ? here : elsewhere).push_back(rank);
  }
  std::string text = "links";
  if (!here.empty())
    text += " to " + some_of(here) + " through shared memory of host " + mine().host_name + " (" +
            std::to_string(here.size() + 1) + " ranks on " + std::to_string(cores_) +
            (cores_ == 1 ? " core)" : " cores)");
  if (elsewhere.empty()) return text;
  text += (here.empty() ? " to " : "; to ") + some_of(elsewhere) + " over TCP";
  if (!verdict_.reason.empty()) text += " (" + verdict_.reason + ")";
  for (const auto& address : links_->addresses())
    text += (&address == &links_->addresses().front() ? ", from " : " and ") + address.text() +
            interface_of(address);
  return text;
}

Status SocketConnector::settle(std::span<const std::string> texts, ConnectorEvents& events) {
  stop_serving();
  events_ = &events;
  std::vector<MeetingVerdict> verdicts;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    auto verdict = decode_verdict(texts[static_cast<std::size_t>(rank)], rank);
    if (!verdict) return verdict.status();
    verdicts.push_back(std::move(*verdict));
  }
  if (Status opened = open_settled_region(verdicts); !opened) return opened;
  region_file_.reset();
  number_hosts(verdicts);
  count_cores();
  dead_.assign(verdicts.size(), false);
  if (Status open = processes_.open(); !open) return open;
  if (Status watched = watch(processes_.descriptor()); !watched) return watched;
  watch_local_processes();
  if (local_) {
    if (Status watched = watch(local_->descriptor()); !watched) return watched;
  }
  std::vector<SocketLinks::Peer> peers;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const Contact& contact = contact_of(rank);
    peers.push_back({name_of(rank, contact), contact.addresses, contact.nonce});
  }
  links_->settle(std::move(peers), events);
  if (logs(LogLevel::info) && options_.world_size > 1) log(LogLevel::info, describe_links());
  // Where many ranks share cores they sleep often, and each barrier would interrupt them all.
  if (region_ &&
      (ranks_per_core(region_->ranks().size(), cores_) == 1 ||
       region_->ranks().size() <= kFewSleepers) &&
      takes_host_barriers())
    mailbox().sends_barriers.store(1, std::memory_order_relaxed);
  mailbox().pid.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_release);
  return {};
}

shm::Mailbox& SocketConnector::mailbox() {
  return region_ ? region_->mailbox(region_->local_rank()) : own_mailbox_;
}

// ---- afterwards ----

void SocketConnector::connect(int peer, TimePoint deadline) {
  if (mark_.forked() || peer < 0 || peer >= options_.world_size || peer == options_.rank) return;
  const int place = place_of_[static_cast<std::size_t>(peer)];
  if (place >= 0) {
    asked_.push_back(place);
  } else {
    links_->connect(peer, deadline);
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(nudge_.get(), &one, sizeof one);
  next_look_ = {};
}

void SocketConnector::link_locally(int place) {
  if (linked_locally_[static_cast<std::size_t>(place)]) return;
  linked_locally_[static_cast<std::size_t>(place)] = true;
  if (logs(LogLevel::debug)) {
    const int rank = region_->ranks()[static_cast<std::size_t>(place)];
    log(LogLevel::debug, "linked to " + name_of(rank, contact_of(rank)) + " through shared memory");
  }
  events_->on_stream(region_->ranks()[static_cast<std::size_t>(place)],
                     open_shared_stream(*region_, place));
}

/// What local peers say in the region: loads only, as long as there is no news.
bool SocketConnector::poll_region(TimePoint now) {
  if (!region_) return false;
  bool moved = false;
  const std::uint32_t doorbell = shared_stream_doorbell(*region_);
  if (doorbell != doorbell_seen_) {
    doorbell_seen_ = doorbell;
    for (std::size_t place = 0; place < linked_locally_.size(); ++place) {
      if (linked_locally_[place] || !shared_stream_awaits(*region_, static_cast<int>(place)))
        continue;
      link_locally(static_cast<int>(place));
      moved = true;
    }
  }
  while (!asked_.empty()) {
    const int place = asked_.back();
    asked_.pop_back();
    link_locally(place);
    moved = true;
  }
  if (now < next_look_) return moved;
  for (std::size_t place = 0; place < linked_locally_.size(); ++place) {
    const int rank = region_->ranks()[place];
    if (rank == options_.rank || dead_[static_cast<std::size_t>(rank)]) continue;
    if (region_->mailbox(static_cast<int>(place)).aborted.load(std::memory_order_acquire) == 0)
      continue;
    report_death(
        rank,
        Status(Code::peer_failed,
               name_of(rank, contact_of(rank)) + " has left the job: it says so itself", {rank}));
    moved = true;
  }
  return moved;
}

bool SocketConnector::poll_descriptors(TimePoint now) {
  bool moved = false;
  std::uint64_t count = 0;
  while (::read(nudge_.get(), &count, sizeof count) > 0) moved = true;
  moved |= processes_.poll(now, [this](int rank, ProcessWatch::Seen seen) {
    const std::string who = name_of(rank, contact_of(rank));
    if (seen == ProcessWatch::Seen::unknown)
      return log(LogLevel::info,
                 "the process of " + who +
                     " cannot be watched; its end will show in its connections only");
    const bool watched = seen == ProcessWatch::Seen::ended;
    report_death(rank, Status(Code::peer_failed,
                              who + (watched ? " has ended: its process is gone"
                                             : " had ended before this rank could watch it"),
                              {rank}));
  });
  if (local_) moved |= local_->poll(now);
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
  next_look_ = now + kLookInterval;
  pollfd any{epoll_.get(), POLLIN, 0};
  if (::poll(&any, 1, 0) > 0 || next_timer() <= now) moved |= poll_descriptors(now);
  return moved;
}

TimePoint SocketConnector::next_timer() const {
  if (events_ == nullptr) return TimePoint::max();
  if (!asked_.empty()) return TimePoint{};
  const TimePoint next = std::min(links_->next_timer(), processes_.next_timer());
  return local_ ? std::min(next, local_->next_timer()) : next;
}

}  // namespace muster::transport
