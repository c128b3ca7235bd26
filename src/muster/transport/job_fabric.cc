#include "muster/transport/job_fabric.h"

#include <algorithm>
#include <utility>

#include "muster/base/bytes.h"
#include "muster/base/env.h"
#include "muster/base/secret.h"
#include "muster/base/tls_setting.h"
#include "muster/base/tunables.h"
#include "muster/store/signed_texts.h"
#include "muster/transport/factory.h"
#include "muster/transport/process_failure.h"

namespace muster::transport {

std::vector<std::string> interfaces_from_environment() {
  auto text = env_text("MUSTER_SOCKET_IFNAME");
  if (!text) text = env_text("GLOO_SOCKET_IFNAME");
  std::vector<std::string> names;
  if (!text) return names;
  for (std::size_t at = 0; at <= text->size();) {
    const auto end = std::min(text->find(',', at), text->size());
    if (end > at) names.push_back(text->substr(at, end - at));
    at = end + 1;
  }
  return names;
}

namespace {

/// What lies in the store carries a proof of the secret.
Exchange exchange_signed(const store::Rendezvous& found, const Secret& secret, TimePoint deadline) {
  const store::SignedTexts texts(secret, found.job, found.world_size);
  return [=, store = found.store, rank = found.rank](const std::string& round,
                                                     const std::string& mine) {
    return texts.all_gather(*store, "fabric/" + round, rank, mine,
                            time_left(steady_clock(), deadline));
  };
}

/// With the ranks' addresses, so that it takes no round of its own. A rank whose overrides of
/// numbers are wrong says so, and no rank goes on.
Exchange compare_on_the_way(Exchange exchange, const std::string& terms) {
  return [exchange = std::move(exchange), terms, refusal = tunables_failure().message()](
             const std::string& round,
             const std::string& mine) -> Result<std::vector<std::string>> {
    if (round != "contacts") return exchange(round, mine);
    auto all =
        exchange(round, ByteWriter().put_text(terms).put_text(refusal).put_bytes(mine).take());
    if (!all) return all;
    std::string first;
    for (std::size_t rank = 0; rank < all->size(); ++rank) {
      std::string& said = (*all)[rank];
      ByteReader in(said);
      const std::string theirs(in.get_text());
      const std::string refused(in.get_text());
      const std::string who = "rank " + std::to_string(rank);
      if (!in.ok())
        return Status(Code::refused,
                      "what " + who + " published cannot be read: it runs another build",
                      {static_cast<int>(rank)});
      if (!refused.empty())
        return Status(Code::invalid_argument, who + " cannot take part: " + refused,
                      {static_cast<int>(rank)});
      if (rank == 0) first = theirs;
      if (theirs != first)
        return Status(Code::mismatch, "rank 0 came with " + first + ", " + who + " with " + theirs,
                      {static_cast<int>(rank)});
      said.erase(0, said.size() - in.left());
    }
    return all;
  };
}

}  // namespace

Result<std::shared_ptr<Fabric>> join_fabric(const store::Rendezvous& found,
                                            const JobFabricOptions& options) {
  auto secret = Secret::from_environment();
  if (!secret) return secret.status();
  const auto payloads = payloads_from_environment();
  if (!payloads) return payloads.status();

  ConnectorOptions connector;
  connector.rank = found.rank;
  connector.world_size = found.world_size;
  connector.job = found.job;
  connector.shared_memory = options.shared_memory;
  connector.interfaces = options.interfaces;
  connector.towards = found.host;
  connector.any_host = found.any_host;
  connector.role = options.role;
  connector.payloads = *payloads;
  if (options.ring_bytes) connector.ring_bytes = *options.ring_bytes;

  FabricOptions fabric;
  fabric.rank = found.rank;
  fabric.world_size = found.world_size;
  fabric.timeout = options.timeout;
  fabric.deadline = options.deadline;
  fabric.rules = options.rules;

  auto exchange =
      compare_on_the_way(exchange_signed(found, *secret, options.deadline), options.terms);
  auto made = Fabric::create(
      fabric, make_socket_connector(std::move(connector), std::move(*secret)), exchange);
  if (!made) return made.status();
  std::shared_ptr<Fabric> joined = std::move(*made);
  follow_process_failure(joined);
  return joined;
}

}  // namespace muster::transport
