// SPDX-License-Identifier: BSD-3-Clause
/// What was meant by a word that is mistyped.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

/// The one of `known` that differs from `word` in the fewest letters: swapped, missing, other or
/// too many. Empty if more than a third of its letters differ. Dashes and underscores are the same.
std::string closest_word(const std::string& word, const std::vector<std::string>& known);

/// "; did you mean X?", or nothing.
std::string did_you_mean(const std::string& word, const std::vector<std::string>& known);

}  // namespace muster::cli
