/// How long a collective over links takes by an algorithm, from its schedule and a few figures of
/// the machine: for any number of ranks, in no time.
///
/// What is modelled: a message costs each of its ends `overhead`, arrives `latency` later
/// (`host_latency` within a host), and its bytes pass at the bandwidth of the host's network, one
/// after another and shared by all ranks of the host, or at `host_bandwidth` within it; adding
/// received bytes takes time; chunks follow each other through slices, trees and chains. Not
/// modelled: switches between hosts that are themselves shared, ranks that come late, memory of
/// different speeds, questions before large messages and invitations to them, and the region of a
/// host: groups of one host run over that.
///
/// Where all ranks do the same, those of one host stand for all; trees and chains are played
/// message by message; for sums from host to host the first chunk is followed on its way, and the
/// busiest host works on those behind it.
#pragma once

#include "muster/collective/op.h"
#include "muster/collective/selection.h"

namespace muster::collective::plan {

/// Seconds, and bytes a second.
struct Machine {
  double overhead = 1.5e-6;
  double latency = 15e-6;
  double host_latency = 3e-6;
  double bandwidth = 3e9;       ///< of a host's network, each way
  double host_bandwidth = 4e9;  ///< between two ranks of a host
  double reduction = 8e9;       ///< bytes added to others
};

struct Crew {
  int ranks = 2;
  int ranks_per_host = 1;
};

/// The part of an operation by an algorithm that does not depend on its size: sums over its steps
/// of the slowest rank's share. Bytes are in parts of the call's.
struct Work {
  double hops = 0;           ///< steps that wait for another host
  double host_hops = 0;      ///< that wait for a rank of the same host
  double messages = 0;       ///< sent or received by one rank
  double network_bytes = 0;  ///< through one host's network
  double host_bytes = 0;     ///< received by one rank from its own host
  double added_bytes = 0;
};
/// Of an algorithm whose ranks all do the same, but for a root on rank 0: neither tree nor chain,
/// nor from host to host.
Work work_of(Op op, Algorithm algorithm, Crew crew);

/// Seconds. `bytes` as `muster bench` counts: each rank's tensor for reductions and broadcast, all
/// pieces together elsewhere. The root is rank 0.
double predict(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew);
/// The same with what `work_of` has found.
double predict(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew,
               const Work& work);

}  // namespace muster::collective::plan
