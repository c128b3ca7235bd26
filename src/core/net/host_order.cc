// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/host_order.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace muster {
namespace {

constexpr std::size_t kExactHosts = 8;   // limit: 5,040 orders
constexpr std::size_t kMostHosts = 256;  // limit: time to search

using Order = std::vector<std::size_t>;

/// The cost of a ring; less is better.
struct RingCost {
  double slowest = 0;    // bytes a second; more is better
  std::int64_t way = 0;  // microseconds; 0 unless all are known

  /// Rates of one class are alike.
  int rate_class() const {
    return static_cast<int>(std::floor(std::log(slowest) / std::log(kMeasuredAlike)));
  }
  bool operator<(const RingCost& other) const {
    return rate_class() != other.rate_class() ? rate_class() > other.rate_class() : way < other.way;
  }
  bool is_worth_leaving(const RingCost& present) const {
    const bool is_faster = slowest >= kMeasuredAlike * present.slowest;
    const bool is_shorter =
        kMeasuredAlike * static_cast<double>(way) <= static_cast<double>(present.way) &&
        present.way > 0 && kMeasuredAlike * slowest >= present.slowest;
    return is_faster || is_shorter;
  }
};

class RingSearch {
 public:
  RingSearch(std::span<const HostHop> hops, std::size_t hosts) : hops_(hops), hosts_(hosts) {
    for (std::size_t from = 0; from < hosts; ++from) {
      for (std::size_t to = 0; to < hosts; ++to)
        knows_ways_ &= from == to || hop(from, to).round_trip.count() > 0;
    }
  }

  RingCost cost(std::span<const std::size_t> order) const {
    RingCost cost{.slowest = slowest_hop(hops_, order)};
    for (std::size_t i = 0; knows_ways_ && i < hosts_; ++i)
      cost.way += hop(order[i], order[(i + 1) % hosts_]).round_trip.count();
    return cost;
  }

  Order best(const Order& present) const {
    if (hosts_ <= kExactHosts) return best_of_all(present);
    Order best = improved(present), other = improved(nearest());
    return cost(other) < cost(best) ? other : best;
  }

 private:
  const HostHop& hop(std::size_t from, std::size_t to) const { return hops_[from * hosts_ + to]; }

  Order best_of_all(Order order) const {
    Order best = order;
    RingCost least = cost(best);
    while (std::next_permutation(order.begin() + 1, order.end())) {
      if (const RingCost found = cost(order); found < least) {
        least = found;
        best = order;
      }
    }
    return best;
  }

  /// From each host to the one that it reaches fastest of those that are left.
  Order nearest() const {
    Order order{0};
    std::vector<bool> taken(hosts_);
    taken[0] = true;
    while (order.size() < hosts_) {
      std::size_t next = hosts_;
      for (std::size_t host = 0; host < hosts_; ++host) {
        if (taken[host]) continue;
        if (next == hosts_ ||
            hop(order.back(), host).bytes_per_s > hop(order.back(), next).bytes_per_s)
          next = host;
      }
      taken[next] = true;
      order.push_back(next);
    }
    return order;
  }

  /// Takes the host that the slowest hop leads to, or comes from, to the place where the ring is
  /// best, as long as that helps.
  Order improved(Order order) const {
    for (RingCost least = cost(order);;) {
      const std::size_t slow = slowest_place(order);
      Order best = order;
      for (const std::size_t from : {slow, (slow + 1) % hosts_}) {
        for (std::size_t to = 1; from != 0 && to < hosts_; ++to) {
          Order moved = order;
          moved.erase(moved.begin() + static_cast<std::ptrdiff_t>(from));
          moved.insert(moved.begin() + static_cast<std::ptrdiff_t>(to), order[from]);
          keep_better(moved, best, least);
        }
        // The part behind it the other way around.
        for (std::size_t end = from + 2; from != 0 && end <= hosts_; ++end) {
          Order turned = order;
          std::reverse(turned.begin() + static_cast<std::ptrdiff_t>(from),
                       turned.begin() + static_cast<std::ptrdiff_t>(end));
          keep_better(turned, best, least);
        }
      }
      if (best == order) return order;
      order = std::move(best);
    }
  }
  void keep_better(const Order& candidate, Order& best, RingCost& least) const {
    const RingCost found = cost(candidate);
    if (!(found < least)) return;
    least = found;
    best = candidate;
  }

  std::size_t slowest_place(const Order& order) const {
    std::size_t slowest = 0;
    for (std::size_t i = 1; i < hosts_; ++i) {
      if (hop(order[i], order[(i + 1) % hosts_]).bytes_per_s <
          hop(order[slowest], order[(slowest + 1) % hosts_]).bytes_per_s)
        slowest = i;
    }
    return slowest;
  }

  const std::span<const HostHop> hops_;
  const std::size_t hosts_;
  bool knows_ways_ = true;
};

}  // namespace

double slowest_hop(std::span<const HostHop> hops, std::span<const std::size_t> order) {
  double slowest = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < order.size(); ++i)
    slowest = std::min(slowest,
                       hops[order[i] * order.size() + order[(i + 1) % order.size()]].bytes_per_s);
  return slowest;
}

std::optional<std::vector<std::size_t>> ring_order(std::span<const HostHop> hops,
                                                   std::size_t hosts) {
  if (hosts < 3 || hosts > kMostHosts || hops.size() != hosts * hosts) return std::nullopt;
  for (std::size_t from = 0; from < hosts; ++from) {
    for (std::size_t to = 0; to < hosts; ++to)
      if (from != to && !(hops[from * hosts + to].bytes_per_s > 0)) return std::nullopt;
  }
  Order present(hosts);
  std::iota(present.begin(), present.end(), std::size_t{0});
  const RingSearch search(hops, hosts);
  Order best = search.best(present);
  if (!search.cost(best).is_worth_leaving(search.cost(present))) return std::nullopt;
  return best;
}

}  // namespace muster
