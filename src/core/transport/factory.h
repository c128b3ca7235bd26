// SPDX-License-Identifier: BSD-3-Clause
/// The makers of connectors, one for each kind of job, and their options. `byte_stream.h` has the
/// makers of single streams.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/transport/connect/connector.h"
#include "core/tunables/tunables_fixed.h"
#include "muster/status.h"

namespace muster::transport {

struct ConnectorOptions {
  int rank = 0;
  int world_size = 1;
  std::string job;                      ///< unique to the job, equal on every rank
  bool shared_memory = true;            ///< false: sockets only, also within a host
  std::vector<std::string> interfaces;  ///< names; empty: the address that routes to `towards`
  std::string towards;                  ///< host of the store; empty: loopback
  bool any_host = false;  ///< no `towards`, but other hosts may join: listen on the address of the
                          ///< default route
  std::size_t ring_bytes = fixed::kFragmentBytes / 2;  ///< of each ordered pair's shared ring
  std::size_t segment_bytes =
      std::size_t{1} << 33;  ///< address space for groups' segments and staging, taken as used
  Handshake::Role role = Handshake::Role::link;
  Handshake::Payloads payloads = Handshake::Payloads::encrypted;  ///< the same on every rank
  /// For tests: ranks with different labels do not count as one host.
  std::string host_label;
};

/// Sockets, and shared memory within a host.
std::unique_ptr<Connector> make_socket_connector(ConnectorOptions options, Secret secret);

/// For ranks that are threads of one process, connected by memory only: no descriptors, no secret.
class LoopbackHub {
 public:
  virtual ~LoopbackHub() = default;
  /// Once per rank; the connector keeps the hub alive.
  virtual std::unique_ptr<Connector> connector(int rank) = 0;
  /// Simulates a kill of `rank`: its streams end, and every other rank sees its death.
  virtual void kill(int rank) = 0;
  /// An exchange for Fabric::create.
  virtual std::vector<std::string> exchange(const std::string& round, int rank,
                                            const std::string& mine) = 0;
};
/// With `with_region` the ranks share a host region in ordinary memory. `cores`: how many they are
/// told to have together; 0: this machine's.
std::shared_ptr<LoopbackHub> make_loopback_hub(int world_size, bool with_region, int cores = 0);

}  // namespace muster::transport
