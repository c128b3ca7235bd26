/// What the tuning file (base/tuning_file.h) says of algorithms: from which size on which one
/// runs, by what a group runs over, operation and number of ranks.
///
///   network.all_reduce.4 = bruck <= 16384, slices
///   shared_memory.all_reduce.2 = one_shot <= 8 KiB, shares
///
/// The line of the largest number of ranks that is not above a group's decides, if it is more than
/// half of it; where there is none the defaults of `Selection` do.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/base/status.h"
#include "muster/collective/selection.h"

namespace muster::collective {

struct Tuning {
  struct Place {
    Medium medium;
    Op op;
    int ranks;
    auto operator<=>(const Place&) const = default;
  };
  /// An algorithm and the largest call that is its.
  struct Step {
    Algorithm algorithm;
    std::uint64_t up_to = Selection::kAlways;
    bool operator==(const Step&) const = default;
  };
  std::map<std::string, std::string, std::less<>>
      numbers;                               ///< of base/tunables.h, kept as they are
  std::map<Place, std::vector<Step>> rules;  ///< growing sizes; the last step has no limit
  std::vector<std::pair<Op, Algorithm>>
      forced;  ///< for every size, number of ranks and medium that has it
};

/// Code::invalid_argument with `name`, the line and what to do. `name` is what the text comes from,
/// for errors.
Result<Tuning> parse_tuning(std::string_view text, const std::string& name);
std::string print_tuning(const Tuning& tuning);
/// "all_reduce:bruck,broadcast:chain", what MUSTER_ALGORITHM holds.
Result<std::vector<std::pair<Op, Algorithm>>> parse_forced(const std::string& text);

/// What the file at `tuning_path()` says (nothing where there is none, unless MUSTER_TUNING names
/// it), and MUSTER_ALGORITHM. Fails also where an override of a number could not be taken.
Result<Tuning> tuning_of_environment();

/// The selection of a group; its first member's counts.
Selection select(const Tuning& tuning, Medium medium, int ranks, GroupPlacement placement = {});

}  // namespace muster::collective
