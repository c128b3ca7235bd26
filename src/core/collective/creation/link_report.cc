// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/creation/link_report.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "core/net/host_order.h"
#include "core/net/link_figures.h"
#include "core/tunables/tunables.h"

namespace muster::collective {
namespace {

constexpr std::uint8_t kLastClass = std::numeric_limits<std::uint8_t>::max();

/// Numbers of one class are alike for `ring_order`, which gets them back from their classes.
std::uint8_t class_of(double number) {
  if (!(number > 0)) return 0;
  const double logarithm = std::log(number) / std::log(kMeasuredAlike);
  return static_cast<std::uint8_t>(std::clamp<double>(1 + std::round(logarithm), 1, kLastClass));
}

double number_of(std::uint8_t of_class) {
  return of_class == 0 ? 0 : std::pow(kMeasuredAlike, of_class - 1);
}

}  // namespace

LinkReport report_links(const transport::Fabric& fabric, std::span<const int> members) {
  LinkReport report;
  const auto hosts = fabric.hosts();
  const auto is_here = [&](int member) {
    return hosts[static_cast<std::size_t>(member)] ==
           hosts[static_cast<std::size_t>(fabric.rank())];
  };
  if (std::ranges::all_of(members, is_here)) return report;
  const auto links = fabric.link_figures();
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto link = links.find(members[i]);
    LinkReport::HopClass hop;
    if (is_here(members[i])) {
      hop = {.rate = kLastClass, .round_trip = 1};
    } else if (link != links.end()) {
      const LinkFigures& figures = link->second;
      // An idle link near by would look slower than a busy one far away.
      const std::uint64_t rate = figures.sent >= kTellingBytes ? figures.bytes_per_s : 0;
      hop = {.rate = class_of(static_cast<double>(rate)),
             .round_trip = class_of(static_cast<double>(figures.round_trip.count()))};
      report.strands = std::max<std::uint64_t>(
          report.strands,
          strands_for(figures.round_trip, tunables().strand_trip, tunables().most_strands));
    }
    if (members.size() <= kMostOrdered) report.hops[i] = hop;
  }
  return report;
}

std::uint64_t most_strands(std::span<const LinkReport> reports) {
  std::uint64_t most = 1;
  for (const LinkReport& each : reports) most = std::max(most, each.strands);
  return most;
}

MemberOrder order_by_rates(std::span<const LinkReport> reports) {
  MemberOrder order{};
  const std::size_t members = reports.size();
  if (members > kMostOrdered || most_strands(reports) == 1) return order;
  std::vector<HostHop> hops;
  for (const LinkReport& from : reports) {
    for (const LinkReport::HopClass& hop : std::span(from.hops).first(members))
      hops.push_back(
          {.bytes_per_s = number_of(hop.rate),
           .round_trip = std::chrono::microseconds(std::llround(number_of(hop.round_trip)))});
  }
  if (const auto found = ring_order(hops, members))
    std::ranges::transform(*found, order.begin(),
                           [](std::size_t member) { return static_cast<std::uint8_t>(member); });
  return order;
}

std::vector<std::uint8_t> places_of(const MemberOrder& order, int size) {
  const auto members = static_cast<std::size_t>(size);
  if (members < 2 || members > kMostOrdered) return {};
  std::vector<std::uint8_t> places(order.begin(), order.begin() + size), sorted = places;
  std::ranges::sort(sorted);
  for (std::size_t i = 0; i < members; ++i)
    if (sorted[i] != i) return {};
  return places;
}

}  // namespace muster::collective
