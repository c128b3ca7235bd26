// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/tree/suggestion.h"

#include <algorithm>

namespace muster::cli {
namespace {

/// A longer word is no mistyped name.
constexpr std::size_t kMostLetters = 64;

/// The optimal string alignment distance: neighbours that are swapped count once.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const std::size_t other = a[i - 1] == b[j - 1] ? 0 : 1;
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + other});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

std::string dashed(std::string word) {
  std::replace(word.begin(), word.end(), '_', '-');
  return word;
}

std::size_t letters_in(const std::string& word) {
  return word.size() - std::min(word.find_first_not_of('-'), word.size());
}

}  // namespace

std::string closest_word(const std::string& word, const std::vector<std::string>& known) {
  if (word.size() > kMostLetters) return {};
  std::string best;
  std::size_t least = std::max<std::size_t>(1, letters_in(word) / 3) + 1;
  for (const std::string& each : known) {
    const std::size_t differ = distance(dashed(word), dashed(each));
    if (differ >= least || differ >= letters_in(each)) continue;
    least = differ;
    best = each;
  }
  return best;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& known) {
  const std::string meant = closest_word(word, known);
  return meant.empty() ? "" : "; did you mean " + meant + "?";
}

}  // namespace muster::cli
