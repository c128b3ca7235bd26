// SPDX-License-Identifier: BSD-3-Clause
/// Test support: hosts with any numbers of ranks, as lists of their first ranks.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace muster::collective {

/// For hosts with these numbers of ranks.
inline std::vector<int> hosts_of(const std::vector<int>& ranks_on) {
  std::vector<int> first_ranks;
  int next = 0;
  for (const int ranks : ranks_on) {
    first_ranks.push_back(next);
    next += ranks;
  }
  return first_ranks;
}

/// Hosts that begin at rank 0 and at the ranks whose bits are set (bit 0: rank 1).
inline std::vector<int> hosts_of_bits(int size, std::uint64_t bits) {
  std::vector<int> first_ranks{0};
  for (int rank = 1; rank < size; ++rank)
    if ((bits >> (rank - 1) & 1) != 0) first_ranks.push_back(rank);
  return first_ranks;
}

/// All ways to put so many ranks on hosts, at least one on each.
inline std::vector<std::vector<int>> all_hosts(int size) {
  std::vector<std::vector<int>> all;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << (size - 1); ++bits)
    all.push_back(hosts_of_bits(size, bits));
  return all;
}

/// One of them; a new host begins with a third of the ranks.
inline std::vector<int> draw_hosts(int size, std::mt19937_64& random) {
  std::vector<int> first_ranks{0};
  for (int rank = 1; rank < size; ++rank)
    if (random() % 3 == 0) first_ranks.push_back(rank);
  return first_ranks;
}

/// Such as "3+2 ranks".
inline std::string hosts_text(int size, std::span<const int> first_ranks) {
  if (first_ranks.empty()) return std::to_string(size) + " ranks";
  std::string text;
  for (std::size_t host = 0; host < first_ranks.size(); ++host) {
    const int after = host + 1 < first_ranks.size() ? first_ranks[host + 1] : size;
    text += (host > 0 ? "+" : "") + std::to_string(after - first_ranks[host]);
  }
  return text + " ranks";
}

}  // namespace muster::collective
