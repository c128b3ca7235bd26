// SPDX-License-Identifier: BSD-3-Clause
/// The part of the tuning file (core/tunables/tuning_file.h) about algorithms: from which size on
/// each one runs, by medium, operation and number of ranks.
///
///   network.all_reduce.4 = bruck <= 16384, slices
///   shared_memory.all_reduce.2 = one_shot <= 8 KiB, shares
///
/// The line with the largest number of ranks that does not exceed the group's applies, if it is
/// more than half of the group's. Otherwise the defaults of `Selection` apply.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/collective/select/selection.h"
#include "muster/status.h"

namespace muster::collective {

struct Tuning {
  struct TuningKey {
    Medium medium;
    Op op;
    int ranks;
    auto operator<=>(const TuningKey&) const = default;
  };
  /// An algorithm and the largest call that it takes.
  struct SizeLimit {
    Algorithm algorithm;
    std::uint64_t up_to = Selection::kAlways;
    bool operator==(const SizeLimit&) const = default;
  };
  /// Overrides of tunables (core/tunables/tunables.h), unparsed.
  std::map<std::string, std::string, std::less<>> numbers;
  std::map<TuningKey, std::vector<SizeLimit>>
      rules;  ///< in order of size; the last step has no limit
  /// For every size and number of ranks, on every medium that has the algorithm.
  std::vector<std::pair<Op, Algorithm>> forced;
};

/// Code::invalid_argument with `name`, the line and what to do. `name`: where the text comes from.
Result<Tuning> parse_tuning(std::string_view text, const std::string& name);
std::string print_tuning(const Tuning& tuning);
/// Parses MUSTER_ALGORITHM, such as "all_reduce:bruck,broadcast:chain".
Result<std::vector<std::pair<Op, Algorithm>>> parse_forced(const std::string& text);

/// The file at `tuning_path()` (empty if there is none, unless MUSTER_TUNING names it), and
/// MUSTER_ALGORITHM. Also fails if an override of a tunable is invalid.
Result<Tuning> tuning_of_environment();

/// The selection of a group; only its first member's counts.
Selection select(const Tuning& tuning, Medium medium, int ranks,
                 const GroupPlacement& placement = {});

}  // namespace muster::collective
