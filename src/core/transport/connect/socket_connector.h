// SPDX-License-Identifier: BSD-3-Clause
/// How ranks on one or several hosts meet: shared memory within a host, sockets between hosts.
/// Behind `make_socket_connector`.
///
/// Memory sharing is tested, not assumed. Ranks of one kernel, network namespace and user are
/// candidates. The lowest creates a region, and those that receive its memory file over the Unix
/// socket and can map it share it (`RegionMeeting`). All others are linked by sockets
/// (`SocketStreams`).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/transport/connect/socket_streams.h"
#include "core/transport/engine/epoll_sets.h"
#include "core/transport/factory.h"
#include "core/transport/failure/process_watch.h"
#include "core/transport/host/region_peers.h"
#include "core/transport/peer_address.h"

namespace muster::transport {

class SocketConnector final : public Connector {
 public:
  SocketConnector(ConnectorOptions options, Secret secret)
      : options_(std::move(options)), secret_(std::move(secret)) {}

  Result<std::string> own_address(TimePoint deadline) override;
  Result<std::string> meet(std::span<const std::string> contacts, TimePoint deadline) override;
  Status settle(std::span<const std::string> verdicts, ConnectorEvents& events) override;
  std::vector<int> hosts() const override { return hosts_; }
  int cores() const override { return cores_; }
  shm::HostRegion* region() override { return region_ ? &region_->region() : nullptr; }
  shm::Mailbox& mailbox() override;
  void connect(int peer, TimePoint deadline) override;
  bool poll(TimePoint now) override;
  int descriptor() const override { return wakeups_.descriptor(); }
  ProcessState process_state(int rank) override;
  std::string end_of_process(int rank) override;
  TimePoint next_timer() const override;
  std::uint64_t refusals() const override {
    return links_->refusals() + meeting_.server().refusals();
  }

 private:
  std::string describe_links(const MeetingVerdict& own) const;
  Status watch_local_processes();
  void choose_barriers();
  bool poll_region(TimePoint now);
  bool poll_descriptors(TimePoint now);
  void report_death(int rank, Status evidence);

  // The thread that meets the other ranks uses all this alone; after `settle`, it is under the
  // fabric's lock. The counts of `refusals` have locks of their own.
  const ConnectorOptions options_;
  const Secret secret_;
  const ProcessMark mark_;
  PeerBook book_;
  ConnectorEvents* events_ = nullptr;

  WakeSet wakeups_;
  std::unique_ptr<SocketStreams> links_;
  RegionMeeting meeting_{options_, secret_, book_};
  std::unique_ptr<RegionPeers> region_;
  ProcessWatch processes_;
  shm::Mailbox own_mailbox_;  // without a region
  std::vector<int> hosts_;
  int cores_ = 1;
  std::vector<bool> dead_;  // by rank: reported
  TimePoint next_look_{};
};

}  // namespace muster::transport
