/// From an init method to a store, a rank and a world size: env://, tcp://, file://.
#pragma once

#include <memory>
#include <string>

#include "muster/store/store.h"

namespace muster::store {

struct RendezvousOptions {
  std::string init_method = "env://";
  int rank = -1;  ///< -1: from the URL's query, the environment, or assigned (tcp://, file://:
                  ///< first come, first numbered)
  int world_size = -1;     ///< -1: from the URL's query or the environment
  std::string group_name;  ///< keeps jobs that share one address or file apart
  Duration timeout = std::chrono::minutes(30);
};

struct Rendezvous {
  std::shared_ptr<Store> store;  ///< already prefixed for this job
  int rank = 0;
  int world_size = 1;
  std::string host;       ///< address of the store, for choosing an interface; empty for file://
  bool any_host = false;  ///< other hosts may come though there is no address: file://
  std::string job;        ///< text that tells this job from others; the same on all ranks
};

/// Blocks until every rank has joined. Errors name what is missing or malformed (variable, URL
/// part) and, at the timeout, the ranks that did not come. Multicast addresses
/// (`tcp://[ff15::1]:29500`, `tcp://239.1.1.1:29500`) find the peers by multicast and assign ranks.
Result<Rendezvous> rendezvous(const RendezvousOptions& options);

/// The same on a store that the ranks have already: `rank` and `world_size` are given,
/// `init_method` is not looked at. The n-th time on one store makes the n-th job. The store's own
/// timeout stays as it is.
Result<Rendezvous> rendezvous_over(std::shared_ptr<Store> store, const RendezvousOptions& options);

}  // namespace muster::store
