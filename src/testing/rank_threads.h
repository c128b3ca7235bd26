// SPDX-License-Identifier: BSD-3-Clause
/// Ranks as threads of one process, each with a fabric of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/transport/fabric.h"
#include "core/transport/factory.h"
#include "muster/clock.h"
#include "testing/limits.h"

namespace muster::testing {

/// How the ranks reach each other.
enum class Wire {
  loopback,  ///< memory, no host region
  region,    ///< memory and one host region, with a core for each rank, whatever this machine has
  tcp,       ///< sockets only
  shm,       ///< sockets, shared memory and a host region, as processes of one host
  mixed,     ///< as shm on each of two pretended hosts (even and odd ranks), sockets between them
  hosts,     ///< the same on pretended hosts of two ranks each, side by side
};
inline constexpr Wire kWires[] = {Wire::loopback, Wire::region, Wire::tcp, Wire::shm, Wire::mixed};
inline constexpr Wire kWiresAndHosts[] = {Wire::loopback, Wire::region, Wire::tcp,
                                          Wire::shm,      Wire::mixed,  Wire::hosts};
const char* wire_name(Wire wire);
/// The host that a rank pretends to be on; empty: the real one.
std::string host_label(Wire wire, int rank);

struct RankThreadsOptions {
  int ranks = 2;
  Wire wire = Wire::loopback;
  Duration timeout = muster::testing::kMustHappen;
  Duration heartbeat_limit =
      Duration::zero();  ///< threads that share two cores with a sanitizer may be silent for long
  bool threads =
      true;  ///< false: none but the ranks' own, so that nothing moves but by what they do
  std::shared_ptr<transport::LoopbackHub>
      hub;  ///< loopback and region: the caller's own, for its faults
};

using RankBody = std::function<void(int rank, std::shared_ptr<transport::Fabric> fabric)>;

/// Runs `body` once per rank, on threads of their own; returns when all have ended. The fabrics go
/// when every body has returned. If a fabric cannot be made, no body runs and std::runtime_error
/// says why.
void run_ranks(const RankThreadsOptions& options, const RankBody& body);
inline void run_ranks(int ranks, Wire wire, const RankBody& body) {
  RankThreadsOptions options;
  options.ranks = ranks;
  options.wire = wire;
  run_ranks(options, body);
}

}  // namespace muster::testing
