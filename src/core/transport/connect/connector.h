// SPDX-License-Identifier: BSD-3-Clause
/// How a fabric meets its peers: finds the ranks of this host, opens streams, detects deaths.
/// Kinds: tcp with shared memory, tcp alone, loopback (ranks as threads, no descriptors), sim
/// (virtual network). Private behind `factory.h`.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/process/process_start.h"
#include "core/shm/host_region.h"
#include "core/transport/byte_stream.h"
#include "core/wait/topology.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

/// A connector's callbacks. Called only from inside `Connector::poll`, under the fabric's lock.
class ConnectorEvents {
 public:
  virtual ~ConnectorEvents() = default;
  /// A stream to `peer` is established, no matter which side requested it. Crossing requests have
  /// been settled to one stream.
  virtual void on_stream(int peer, std::unique_ptr<ByteStream> stream) = 0;
  /// The stream requested with `connect` cannot be opened; `cause` says why and what to try. Not
  /// called for a lost crossing.
  virtual void on_connect_failed(int peer, Status cause) = 0;
  /// The process of `peer` has ended (Code::peer_failed, ranks = {peer}; seen by pidfd) or has left
  /// (stated by it in the region).
  virtual void on_death(int peer, Status evidence) = 0;
};

class Connector {
 public:
  virtual ~Connector() = default;

  /// Meeting, in three steps with an exchange among all ranks between them (the fabric does the
  /// exchanges):
  /// 1. what to publish: addresses, host identity, process; may ask a resolver, up to the deadline;
  virtual Result<std::string> own_address(TimePoint deadline) = 0;
  /// 2. given all ranks' contacts, set up what this host shares; returns this rank's verdict for
  /// publication. Blocks, up to the deadline;
  virtual Result<std::string> meet(std::span<const std::string> contacts, TimePoint deadline) = 0;
  /// 3. given all ranks' verdicts, settle which ranks are local. From now on `poll` may report to
  /// `events`.
  virtual Status settle(std::span<const std::string> verdicts, ConnectorEvents& events) = 0;

  /// After settle: host number of each rank, from 0 in the order of the first rank on each; the
  /// same on all ranks.
  virtual std::vector<int> hosts() const = 0;
  /// After settle: how many cores the ranks of this host can keep busy together; the same to all of
  /// them.
  virtual int cores() const { return usable_cores(); }
  /// This host's region; null where nothing is shared (then every pair uses streams only).
  virtual shm::HostRegion* region() = 0;
  /// This rank's mailbox, in the region if there is one. Never null after settle.
  virtual shm::Mailbox& mailbox() = 0;

  /// Asks for a stream to `peer`; answered by on_stream or on_connect_failed from a later poll.
  /// Never blocks.
  virtual void connect(int peer, TimePoint deadline) = 0;
  /// One pass over listener, handshakes, pending connects and deaths. Never blocks. Returns whether
  /// anything happened.
  virtual bool poll(TimePoint now) = 0;
  /// For epoll: readable when `poll` has something to do; -1 if there are no descriptors.
  virtual int descriptor() const = 0;
  /// The next time at which `poll` wants to be called without news (handshake limits, retries); max
  /// if none.
  virtual TimePoint next_timer() const = 0;
  /// After settle: what the kernel says of the process of a rank of this host. Unknown for ranks of
  /// other hosts, and where the kernel does not tell. Some system calls.
  virtual ProcessState process_state([[maybe_unused]] int rank) { return ProcessState::unknown; }
  /// After settle: how the process of a rank of this host has ended: "has died (SIGSEGV)"; empty if
  /// it runs, or the kernel does not tell. Some system calls.
  virtual std::string end_of_process([[maybe_unused]] int rank) { return {}; }
  /// After settle: how many connections its listeners have refused. Thread-safe.
  virtual std::uint64_t refusals() const { return 0; }
};

}  // namespace muster::transport
