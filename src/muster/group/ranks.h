/// A list of ranks that may be left out: `new_group({.ranks = {0, 1}})`.
#pragma once

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

namespace muster {

/// Made without a list (`{}`, `std::nullopt`) it means all ranks; an empty vector is an empty list.
class Ranks {
 public:
  Ranks() = default;
  Ranks(std::nullopt_t) {}
  Ranks(std::initializer_list<int> list) : list_(list) {}
  Ranks(std::vector<int> list) : list_(std::move(list)) {}
  Ranks(std::optional<std::vector<int>> list) : list_(std::move(list)) {}

  bool has_value() const { return list_.has_value(); }
  /// Only where there is a list.
  const std::vector<int>& value() const { return *list_; }
  std::vector<int> value_or(std::vector<int> all) const { return list_ ? *list_ : std::move(all); }

 private:
  std::optional<std::vector<int>> list_;
};

}  // namespace muster
