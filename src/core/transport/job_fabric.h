// SPDX-License-Identifier: BSD-3-Clause
/// From ranks that have found each other to a fabric: what every kind of job does next, process
/// groups and remote calls alike.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/net/this_host.h"
#include "core/rendezvous/rendezvous.h"
#include "core/security/handshake.h"
#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

struct JobFabricOptions {
  bool shared_memory = true;  ///< false: sockets only, also within a host
  std::vector<std::string> interfaces = named_interfaces();
  std::optional<std::size_t> ring_bytes =
      {};  ///< of each ordered pair's shared ring; absent: the fabric's
  Duration timeout = std::chrono::minutes(30);  ///< as in FabricOptions
  TimePoint deadline = TimePoint::max();
  const FingerprintRules* rules = nullptr;
  Handshake::Role role = Handshake::Role::link;  ///< of its links: they have keys of their own
  /// What else must be the same on every rank, as people read it. It travels with the ranks'
  /// addresses; where it is not, Code::mismatch with rank 0's and the other's, naming that one.
  std::string terms = {};
  /// As in FabricOptions; absent: MUSTER_HEARTBEAT_TIMEOUT, else the fabric's.
  std::optional<Duration> heartbeat_limit = {};
  std::function<void(const Silence&)> on_silence = {};  ///< as in FabricOptions
};

/// Makes a fabric over sockets, and shared memory within a host, with the secret of the
/// environment. The texts that ranks exchange through the store carry a proof of that secret
/// (`core/store/signed_texts.h`). Blocks until all ranks have met, up to the deadline. If this
/// process fails later, the other ranks are told (process_failure.h).
Result<std::shared_ptr<Fabric>> join_fabric(const store::Rendezvous& found,
                                            const JobFabricOptions& options);

}  // namespace muster::transport
