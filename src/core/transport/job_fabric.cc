// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/job_fabric.h"

#include <utility>

#include "core/base/bytes.h"
#include "core/base/environment.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/store/signed_texts.h"
#include "core/transport/factory.h"
#include "core/transport/failure/process_failure.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
namespace {

/// Texts in the store carry an HMAC with the secret.
Exchange exchange_signed(const store::Rendezvous& found, const Secret& secret, TimePoint deadline) {
  const store::SignedTexts texts(secret, found.job, found.world_size);
  return [=, store = found.store, rank = found.rank](const std::string& round,
                                                     const std::string& mine) {
    return texts.all_gather(*store, "fabric/" + round, rank, mine,
                            time_left(steady_clock(), deadline));
  };
}

/// Compares the terms in the exchange of addresses, so that no extra round is needed. If a rank has
/// invalid overrides of tunables, no rank continues.
Exchange compare_on_the_way(Exchange exchange, const std::string& terms) {
  return [exchange = std::move(exchange), terms, refusal = tunables_failure().message()](
             const std::string& round,
             const std::string& mine) -> Result<std::vector<std::string>> {
    if (round != "contacts") return exchange(round, mine);
    auto all =
        exchange(round, ByteWriter().put_text(terms).put_text(refusal).put_bytes(mine).take());
    if (!all) return all;
    std::string first;
    const auto failure_of = [&first](std::size_t at, bool readable, const std::string& refused,
                                     const std::string& theirs) {
      const std::string who = "rank " + std::to_string(at);
      const std::vector<int> ranks{static_cast<int>(at)};
      if (!readable)
        return Status(Code::refused,
                      "what " + who + " published cannot be read: it runs another build", ranks);
      if (!refused.empty())
        return Status(Code::invalid_argument, who + " cannot take part: " + refused, ranks);
      if (at > 0 && theirs != first)
        return Status(Code::mismatch, "rank 0 came with " + first + ", " + who + " with " + theirs,
                      ranks);
      return Status();
    };
    for (std::size_t rank = 0; rank < all->size(); ++rank) {
      std::string& said = (*all)[rank];
      ByteReader in(said);
      const std::string theirs(in.get_text());
      const std::string refused(in.get_text());
      if (Status failure = failure_of(rank, in.ok(), refused, theirs); !failure) return failure;
      if (rank == 0) first = theirs;
      said.erase(0, said.size() - in.left());
    }
    return all;
  };
}

Result<Duration> heartbeat_limit_of(const JobFabricOptions& options) {
  if (options.heartbeat_limit) return *options.heartbeat_limit;
  constexpr std::int64_t kMostSeconds = 365 * 24 * 3600;  // limit: of a clock's numbers
  const auto seconds = env_integer("MUSTER_HEARTBEAT_TIMEOUT", 0, kMostSeconds);
  if (!seconds) return seconds.status();
  return *seconds ? Duration(std::chrono::seconds(**seconds)) : kHeartbeatLimit;
}

}  // namespace

Result<std::shared_ptr<Fabric>> join_fabric(const store::Rendezvous& found,
                                            const JobFabricOptions& options) {
  auto secret = Secret::from_environment();
  if (!secret) return secret.status();
  const auto payloads = payloads_from_environment();
  if (!payloads) return payloads.status();
  const auto heartbeat_limit = heartbeat_limit_of(options);
  if (!heartbeat_limit) return heartbeat_limit.status();

  ConnectorOptions connector;
  connector.rank = found.rank;
  connector.world_size = found.world_size;
  connector.job = found.job;
  connector.shared_memory = options.shared_memory;
  connector.interfaces = options.interfaces;
  connector.towards = found.host;
  connector.any_host = found.any_host;
  connector.role = options.role;
  // Messages of remote calls may hold pickles, so an attacker who could modify one could run code.
  if (options.role == Handshake::Role::link) connector.payloads = *payloads;
  if (options.ring_bytes) connector.ring_bytes = *options.ring_bytes;

  FabricOptions fabric;
  fabric.rank = found.rank;
  fabric.world_size = found.world_size;
  fabric.timeout = options.timeout;
  fabric.deadline = options.deadline;
  fabric.rules = options.rules;
  fabric.heartbeat_limit = *heartbeat_limit;
  fabric.on_silence = options.on_silence;

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
