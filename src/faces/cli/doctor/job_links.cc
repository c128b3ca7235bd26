// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/job_links.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <span>

#include "core/net/host_order.h"
#include "core/trace/analysis.h"

namespace muster::cli {
namespace {

constexpr std::size_t kMostHosts = 12;

/// Measured by all connections from one host to another.
struct PairFigures {
  LinkFigures best;
  std::uint64_t sent = 0, resent = 0;
};

void add(PairFigures& pair, const LinkFigures& figures) {
  const auto known = [](const LinkFigures& each) { return each.round_trip.count() > 0; };
  if (known(figures) && (!known(pair.best) || figures.round_trip < pair.best.round_trip))
    pair.best.round_trip = figures.round_trip;
  if (figures.sent >= kTellingBytes)
    pair.best.bytes_per_s = std::max(pair.best.bytes_per_s, figures.bytes_per_s);
  pair.sent += figures.sent;
  pair.resent += figures.resent;
}

/// With three digits, or more before the point.
std::string formatted(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value >= 100 ? "%.0f" : "%.3g", value);
  return text;
}

/// "940 (0.2)"
std::string figures_of(const HostLink& link) {
  const auto known = [](double value) { return value > 0 ? formatted(value) : "?"; };
  return known(link.mbit_per_s) + " (" + known(link.round_trip_ms) + ")";
}

std::string padded(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

std::vector<std::string> matrix(const HostLinks& all) {
  constexpr std::size_t kWidth = 16;
  std::string head = padded("to", 4);
  for (std::size_t to = 0; to < all.hosts.size(); ++to) head += padded(std::to_string(to), kWidth);
  std::vector<std::string> lines{
      "Mbit/s (round trip in ms) from the host of the line to that of the column; ? is not known",
      head};
  for (std::size_t from = 0; from < all.hosts.size(); ++from) {
    std::string line = padded(std::to_string(from), 4);
    for (std::size_t to = 0; to < all.hosts.size(); ++to) {
      const auto link = std::ranges::find_if(
          all.links, [&](const HostLink& each) { return each.from == from && each.to == to; });
      line += padded(link == all.links.end() ? "-" : figures_of(*link), kWidth);
    }
    lines.push_back(line + "   " + all.hosts[from]);
  }
  return lines;
}

std::vector<std::string> slowest(const HostLinks& all) {
  std::vector<HostLink> known;
  std::ranges::copy_if(all.links, std::back_inserter(known),
                       [](const HostLink& each) { return each.mbit_per_s > 0; });
  std::ranges::stable_sort(known, {}, &HostLink::mbit_per_s);
  if (known.size() > kMostHosts) known.resize(kMostHosts);
  std::vector<std::string> lines{std::to_string(all.hosts.size()) + " hosts, " +
                                 std::to_string(all.links.size()) + " links, the slowest " +
                                 std::to_string(known.size()) +
                                 " in Mbit/s (round trip in ms); --json has all"};
  for (const HostLink& each : known)
    lines.push_back(figures_of(each) + " from " + all.hosts[each.from] + " to " +
                    all.hosts[each.to]);
  return lines;
}

}  // namespace

double part_resent(std::uint64_t sent, std::uint64_t resent) {
  return sent == 0 ? 0 : static_cast<double>(resent) / static_cast<double>(sent);
}

HostLinks links_between_hosts(const trace::AskedJob& job) {
  HostLinks all;
  std::map<std::string, std::size_t> numbers;
  std::map<int, std::size_t> host_of;
  std::vector<std::vector<int>> ranks;
  for (const trace::RankTrace& trace : job.job.ranks) {
    const auto [found, is_new] = numbers.emplace(trace.host + '\n' + trace.boot, numbers.size());
    if (is_new) {
      all.hosts.push_back(trace.host);
      ranks.emplace_back();
    }
    host_of[trace.rank] = found->second;
    ranks[found->second].push_back(trace.rank);
  }
  for (std::size_t host = 0; host < ranks.size(); ++host)
    all.hosts[host] += " (" + trace::list_ranks(ranks[host]) + ")";
  std::map<std::pair<std::size_t, std::size_t>, PairFigures> pairs;
  for (const auto& [ends, figures] : job.links) {
    const auto from = host_of.find(ends.first), to = host_of.find(ends.second);
    if (from == host_of.end() || to == host_of.end() || from->second == to->second) continue;
    add(pairs[{from->second, to->second}], figures);
  }
  for (const auto& [ends, pair] : pairs)
    all.links.push_back({.from = ends.first,
                         .to = ends.second,
                         .round_trip_ms = static_cast<double>(pair.best.round_trip.count()) / 1e3,
                         .mbit_per_s = static_cast<double>(pair.best.bytes_per_s) * 8 / 1e6,
                         .resent = part_resent(pair.sent, pair.resent)});
  return all;
}

std::optional<std::vector<std::size_t>> ring_of(const HostLinks& links) {
  const std::size_t hosts = links.hosts.size();
  std::vector<HostHop> hops(hosts * hosts);
  for (const HostLink& each : links.links)
    hops[each.from * hosts + each.to] = {
        .bytes_per_s = each.mbit_per_s * 1e6 / 8,
        .round_trip = std::chrono::microseconds(std::lround(each.round_trip_ms * 1e3))};
  return ring_order(hops, hosts);
}

std::vector<std::string> describe(const HostLinks& links) {
  if (links.hosts.size() < 2) return {"all ranks that answer are on one host"};
  if (links.links.empty()) return {"no rank has used a link to another host yet"};
  auto lines = links.hosts.size() <= kMostHosts ? matrix(links) : slowest(links);
  if (const auto order = ring_of(links)) {
    std::string line = "a ring of the hosts is fastest in the order";
    for (const std::size_t host : *order) line += " " + std::to_string(host);
    lines.push_back(line + ": name them to the launcher in this order");
  }
  return lines;
}

}  // namespace muster::cli
