/// An optional list of ranks: `new_group({.ranks = {0, 1}})`.
#pragma once

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

namespace muster {

/// Without a list (`{}`, `std::nullopt`) it means all ranks. An empty vector is an empty list.
class Ranks {
 public:
  Ranks() = default;
  Ranks(std::nullopt_t) {}
  Ranks(std::initializer_list<int> list) : list_(list) {}
  Ranks(std::vector<int> list) : list_(std::move(list)) {}
  Ranks(std::optional<std::vector<int>> list) : list_(std::move(list)) {}

  bool has_value() const { return list_.has_value(); }
  /// Requires has_value().
  const std::vector<int>& value() const { return *list_; }
  std::vector<int> value_or(std::vector<int> all) const { return list_ ? *list_ : std::move(all); }

 private:
  std::optional<std::vector<int>> list_;
};

}  // namespace muster
