/// How ranks on one or several hosts meet: shared memory within a host, sockets between hosts.
/// Behind `make_socket_connector`.
///
/// Who shares memory is found out, not assumed: ranks of one kernel, network namespace and user are
/// candidates, the lowest makes a region, and those that really get its memory file over the Unix
/// socket, and map it, share it. All others are linked by sockets.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/fork_guard.h"
#include "muster/shm/region_memory.h"
#include "muster/shm/shared_mapping.h"
#include "muster/transport/contact.h"
#include "muster/transport/factory.h"
#include "muster/transport/local_arenas.h"
#include "muster/transport/process_watch.h"
#include "muster/transport/reception.h"
#include "muster/transport/socket_links.h"

namespace muster::transport {

class SocketConnector final : public Connector {
 public:
  SocketConnector(ConnectorOptions options, Secret secret);
  ~SocketConnector() override;

  Result<std::string> contact(TimePoint deadline) override;
  Result<std::string> meet(std::span<const std::string> contacts, TimePoint deadline) override;
  Status settle(std::span<const std::string> verdicts, ConnectorEvents& events) override;
  std::vector<int> hosts() const override { return hosts_; }
  int cores() const override { return cores_; }
  shm::HostRegion* region() override { return region_.get(); }
  shm::Mailbox& mailbox() override;
  void connect(int peer, TimePoint deadline) override;
  bool poll(TimePoint now) override;
  int descriptor() const override { return epoll_.get(); }
  TimePoint next_timer() const override;

 private:
  Result<std::vector<SocketAddress>> addresses_to_listen_on(TimePoint deadline) const;
  Status make_epoll();
  Status watch(int descriptor);

  Status check_contacts() const;
  Status check_reachable(int rank) const;
  std::vector<int> candidates() const;
  shm::RegionShape shape_for(const std::vector<int>& ranks, std::size_t places, int maker) const;
  Status make_region(const std::vector<int>& ranks);
  Status fetch_region(const std::vector<int>& ranks, TimePoint deadline);
  Status serve_locally();
  void stop_serving();

  Status open_settled_region(const std::vector<MeetingVerdict>& verdicts);
  void number_hosts(const std::vector<MeetingVerdict>& verdicts);
  void count_cores();
  std::string describe_links() const;
  void watch_local_processes();

  void link_locally(int place);
  bool poll_region(TimePoint now);
  bool poll_descriptors(TimePoint now);
  void report_death(int rank, Status evidence);
  void answer(GuardedDescriptor socket, const Handshake::Peer& peer);
  const Contact& mine() const { return book_[static_cast<std::size_t>(options_.rank)]; }
  const Contact& contact_of(int rank) const { return book_[static_cast<std::size_t>(rank)]; }

  ConnectorOptions options_;
  Secret secret_;
  ProcessMark mark_;
  Contact self_;
  Handshake::Hello local_hello_;
  std::vector<Contact> book_;
  ConnectorEvents* events_ = nullptr;

  GuardedDescriptor epoll_;
  GuardedDescriptor nudge_;  // an eventfd: work that needs no other descriptor
  std::unique_ptr<SocketLinks> links_;
  std::unique_ptr<Reception> local_;  // on the abstract Unix socket
  ProcessWatch processes_;

  // While the ranks meet, a thread answers local requests: nobody polls yet.
  std::thread server_;
  GuardedDescriptor stop_server_;

  GuardedDescriptor region_file_;
  std::shared_ptr<shm::SharedMapping> region_mapping_;
  std::size_t places_ = 0;
  MeetingVerdict verdict_;
  std::shared_ptr<LocalArenas> arenas_;
  std::unique_ptr<shm::HostRegion> region_;
  shm::Mailbox own_mailbox_;
  std::vector<int> hosts_;
  int cores_ = 1;
  std::vector<int> place_of_;  // rank to its place in the region, or -1

  std::vector<bool> dead_;            // by rank: reported
  std::vector<bool> linked_locally_;  // by place
  std::vector<int> asked_;            // places to be linked at the next poll
  std::vector<std::pair<int, Status>> failed_;
  std::uint32_t doorbell_seen_ = 0;
  TimePoint next_look_{};
};

}  // namespace muster::transport
