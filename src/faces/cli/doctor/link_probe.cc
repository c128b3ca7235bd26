// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/link_probe.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/net/this_host.h"
#include "core/rendezvous/rendezvous.h"
#include "core/trace/analysis.h"
#include "core/transport/job_fabric.h"

namespace muster::cli {
namespace {

constexpr Duration kMeetLimit = std::chrono::minutes(2);   // limit: patience
constexpr Duration kProbeLimit = std::chrono::minutes(5);  // limit: patience
constexpr Duration kPairLimit = std::chrono::seconds(20);  // limit: patience
constexpr Duration kLongBlock = std::chrono::milliseconds(300);
constexpr int kRoundTrips = 5, kManyTrips = 8;
constexpr std::size_t kSmallestBlock = 256 << 10, kLargestBlock = 64 << 20;

/// Pairs of hosts may be measured one after the other.
Duration limit_for(std::size_t hosts) {
  return kProbeLimit + static_cast<Duration::rep>(hosts * (hosts - 1) / 2) * kPairLimit;
}

/// One rank's side of all measurements. A block is announced by its size, and answered by a byte
/// once it has arrived; 0 ends a measurement.
class LinkProbe {
 public:
  LinkProbe(transport::Fabric& fabric, TimePoint deadline)
      : fabric_(fabric), channel_(fabric.bootstrap()), deadline_(deadline), block_(kLargestBlock) {}

  Result<LinkFigures> measure(int peer) {
    Duration trip = Duration::max();
    for (int i = 0; i < kRoundTrips; ++i) {
      const auto took = time_block(peer, 1);
      if (!took) return took.status();
      trip = std::min(trip, *took);
    }
    LinkFigures figures;
    figures.round_trip = std::chrono::duration_cast<std::chrono::microseconds>(trip);
    for (std::size_t bytes = kSmallestBlock; bytes <= kLargestBlock; bytes *= 4) {
      const auto took = time_block(peer, bytes);
      if (!took) return took.status();
      const Duration sending = *took > trip ? *took - trip : *took;
      figures.bytes_per_s = static_cast<std::uint64_t>(
          static_cast<double>(bytes) / std::chrono::duration<double>(sending).count());
      figures.sent += bytes;
      if (tells_rate(sending, trip)) break;
    }
    const std::uint64_t end = 0;
    if (Status sent = send(peer, bytes_of(end)); !sent) return sent;
    return figures;
  }

  /// The other side of `measure`.
  Status serve(int peer) {
    for (;;) {
      std::uint64_t size = 0;
      if (Status got = receive(peer, std::as_writable_bytes(std::span(&size, 1))); !got) return got;
      if (size == 0) return {};
      if (size > block_.size())
        return Status(Code::mismatch, "rank " + std::to_string(peer) + " announces " +
                                          std::to_string(size) +
                                          " bytes; do all hosts have the same version of muster?");
      const auto block = MutableBytes(block_).first(static_cast<std::size_t>(size));
      if (Status got = receive(peer, block); !got) return got;
      if (Status sent = send(peer, ConstBytes(block_).first(1)); !sent) return sent;
    }
  }

 private:
  static ConstBytes bytes_of(const std::uint64_t& value) {
    return std::as_bytes(std::span(&value, 1));
  }

  Result<Duration> time_block(int peer, std::size_t bytes) {
    const std::uint64_t size = bytes;
    const TimePoint begin = steady_clock().now();
    if (Status sent = send(peer, bytes_of(size)); !sent) return sent;
    if (Status sent = send(peer, ConstBytes(block_).first(bytes)); !sent) return sent;
    std::byte answer{};
    if (Status got = receive(peer, MutableBytes(&answer, 1)); !got) return got;
    return steady_clock().now() - begin;
  }

  Status send(int peer, ConstBytes data) { return finish(channel_.send(peer, 0, data, {})); }
  Status receive(int peer, MutableBytes data) {
    return finish(channel_.receive(peer, 0, data, {}));
  }
  Status finish(const transport::TransferRef& transfer) {
    if (fabric_.wait([&] { return transfer->done(); }, deadline_)) return transfer->status();
    channel_.cancel(transfer);
    return Status(Code::timed_out, "the links could not be measured in time: rank " +
                                       std::to_string(transfer->peer()) + " has not answered");
  }

  transport::Fabric& fabric_;
  transport::Channel& channel_;
  const TimePoint deadline_;
  std::vector<std::byte> block_;
};

/// The text for the others of what a rank has measured of the links from its host.
std::string encode(const std::vector<HostLink>& links) {
  ByteWriter out;
  out.put_text(host_name()).put(static_cast<std::uint32_t>(links.size()));
  for (const HostLink& each : links)
    out.put(static_cast<std::uint32_t>(each.to))
        .put(each.round_trip_ms)
        .put(each.mbit_per_s)
        .put(each.resent);
  return out.take();
}

HostLink link_of(std::size_t from, std::size_t to, const LinkFigures& figures) {
  return {.from = from,
          .to = to,
          .round_trip_ms = static_cast<double>(figures.round_trip.count()) / 1e3,
          .mbit_per_s = static_cast<double>(figures.bytes_per_s) * 8 / 1e6};
}

/// The ranks of each host.
std::vector<std::vector<int>> ranks_by_host(std::span<const int> hosts) {
  std::vector<std::vector<int>> ranks(
      static_cast<std::size_t>(*std::ranges::max_element(hosts) + 1));
  for (std::size_t rank = 0; rank < hosts.size(); ++rank)
    ranks[static_cast<std::size_t>(hosts[rank])].push_back(static_cast<int>(rank));
  return ranks;
}

/// Each two hosts in the same order on all of them: none waits for one that waits for it.
Result<std::vector<HostLink>> measure_own(transport::Fabric& fabric,
                                          const std::vector<std::vector<int>>& ranks,
                                          TimePoint deadline) {
  std::vector<HostLink> links;
  const auto own =
      static_cast<std::size_t>(fabric.hosts()[static_cast<std::size_t>(fabric.rank())]);
  if (ranks[own].front() != fabric.rank()) return links;
  LinkProbe probe(fabric, deadline);
  for (std::size_t first = 0; first < ranks.size(); ++first)
    for (std::size_t second = first + 1; second < ranks.size(); ++second)
      for (const auto& [from, to] : {std::pair(first, second), std::pair(second, first)}) {
        if (own == from) {
          const auto figures = probe.measure(ranks[to].front());
          if (!figures) return figures.status();
          links.push_back(link_of(from, to, *figures));
        } else if (own == to) {
          if (Status served = probe.serve(ranks[from].front()); !served) return served;
        }
      }
  const auto counted = fabric.link_figures();
  for (HostLink& each : links)
    if (const auto found = counted.find(ranks[each.to].front()); found != counted.end())
      each.resent = part_resent(found->second.sent, found->second.resent);
  return links;
}

/// Reads all ranks' texts.
Result<HostLinks> decode(const std::vector<std::string>& texts,
                         const std::vector<std::vector<int>>& ranks) {
  HostLinks all;
  for (std::size_t host = 0; host < ranks.size(); ++host) {
    ByteReader in(texts[static_cast<std::size_t>(ranks[host].front())]);
    all.hosts.push_back(std::string(in.get_text()) + " (" + trace::list_ranks(ranks[host]) + ")");
    const auto count = in.get<std::uint32_t>();
    for (std::uint32_t i = 0; i < count && in.ok(); ++i) {
      HostLink link{.from = host, .to = in.get<std::uint32_t>()};
      link.round_trip_ms = in.get<double>();
      link.mbit_per_s = in.get<double>();
      link.resent = in.get<double>();
      if (link.to < ranks.size()) all.links.push_back(link);
    }
    if (!in.at_end())
      return Status(Code::mismatch, "rank " + std::to_string(ranks[host].front()) +
                                        " tells of its links in other words; do all hosts have the "
                                        "same version of muster?");
  }
  return all;
}

Result<ProbedLinks> probe_as(const store::Rendezvous& found) {
  const auto fabric = transport::join_fabric(found, {.timeout = kMeetLimit});
  if (!fabric) return fabric.status();
  const auto ranks = ranks_by_host((*fabric)->hosts());
  const TimePoint deadline = deadline_after(steady_clock(), limit_for(ranks.size()));
  const auto own = measure_own(**fabric, ranks, deadline);
  if (!own) return own.status();
  const auto exchange =
      transport::exchange_over(found.store, "links", found.rank, found.world_size, deadline);
  const auto texts = exchange("figures", encode(*own));
  if (!texts) return texts.status();
  auto links = decode(*texts, ranks);
  if (!links) return links.status();
  return ProbedLinks{found.rank, std::move(*links)};
}

}  // namespace

bool tells_rate(Duration sending, Duration round_trip) {
  return sending >= kLongBlock && sending >= kManyTrips * round_trip;
}

Result<ProbedLinks> probe_links() {
  const auto found = store::rendezvous({.timeout = kMeetLimit});
  if (!found) return found.status();
  auto probed = probe_as(*found);
  if (!probed) store::abandon(found->store, probed.status());  // the others would wait
  return probed;
}

}  // namespace muster::cli
