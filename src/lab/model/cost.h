// SPDX-License-Identifier: BSD-3-Clause
/// Predicts how long a collective takes over links, from its algorithm's schedule and a few machine
/// parameters, for any number of ranks, without running it.
///
/// Modelled: a message costs each end `overhead` and arrives `latency` later (`host_latency` within
/// a host). Its bytes are serialized at the bandwidth of the host's network, which all ranks of the
/// host share, or at `host_bandwidth` within the host. Adding received bytes takes time. Chunks are
/// pipelined through slices, trees and chains. Not modelled: shared switches between hosts, late
/// ranks, memory of different speeds, the RTS/CTS exchange before large messages, ready-to-receive
/// messages, and the host region, which groups on one host use.
///
/// If all ranks do the same work, one host is computed for all. Trees and chains are simulated
/// message by message. For sums from host to host, the time is that of the first chunk along its
/// whole path, plus the busiest host's work for each later chunk.
#pragma once

#include "core/collective/op.h"
#include "core/collective/select/selection.h"

namespace muster::collective::plan {

/// In seconds and bytes per second.
struct Machine {
  double overhead = 1.5e-6;
  double latency = 15e-6;
  double host_latency = 3e-6;
  double bandwidth = 3e9;       ///< of a host's network, per direction
  double host_bandwidth = 4e9;  ///< between two ranks of a host
  double reduction = 8e9;       ///< bytes added to a sum
};

struct Crew {
  int ranks = 2;
  int ranks_per_host = 1;
};

/// The size-independent cost of an algorithm: sums over its steps of the slowest rank's share.
/// Bytes are fractions of the call's bytes.
struct OperationCost {
  double hops = 0;           ///< steps that wait for another host
  double host_hops = 0;      ///< steps that wait for a rank on the same host
  double messages = 0;       ///< sent or received by one rank
  double network_bytes = 0;  ///< through one host's network
  double host_bytes = 0;     ///< received by one rank from its own host
  double added_bytes = 0;
};
/// For an algorithm in which all ranks do the same, except for a root at rank 0: not for trees,
/// chains or sums from host to host.
OperationCost work_of(Op op, Algorithm algorithm, Crew crew);

/// Chunks that follow each other through an algorithm, for `bytes` as `predict` takes them.
double rounds_of(Op op, Algorithm algorithm, double bytes, Crew crew);

/// Seconds. `bytes` as `muster bench` counts them: each rank's tensor for reductions and broadcast,
/// all pieces together otherwise. The root is rank 0.
double predict(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew);
/// The same with a precomputed `work_of`.
double predict(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew,
               const OperationCost& work);

}  // namespace muster::collective::plan
