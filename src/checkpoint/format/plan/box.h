// SPDX-License-Identifier: BSD-3-Clause
/// Boxes of n-dimensional tensors: which elements a rank has, what two boxes have in common, and
/// where those elements lie in memory. Pure arithmetic on element counts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::shards {

/// Sizes or offsets, one per dimension; empty for a scalar.
using Extent = std::vector<std::int64_t>;

/// The product; 1 for a scalar. None where a size is negative or the product exceeds 2^62.
std::optional<std::int64_t> element_count(const Extent& sizes);
/// "[4, 8]".
std::string text_of(const Extent& extent);

/// The elements from `offsets` on, `sizes` of them in each dimension, in row-major order.
struct Box {
  Extent offsets, sizes;

  /// Number of elements. The sizes must have been checked: the product is not checked for overflow.
  std::int64_t elements() const;
  /// Whether it lies within a tensor of these sizes.
  bool is_within(const Extent& whole) const;
  bool operator==(const Box&) const = default;
  auto operator<=>(const Box&) const = default;  // NOLINT(modernize-use-nullptr): it has none
};

/// A whole tensor.
Box box_of(const Extent& sizes);

/// The elements of both; none where they share none. Both have as many dimensions.
std::optional<Box> intersection(const Box& a, const Box& b);

/// The elements [first, first + count) of a row-major tensor, as boxes in that order. Each box is
/// a contiguous stretch; a tensor of n dimensions needs at most 2n - 1 of them.
std::vector<Box> boxes_of_stretch(const Extent& sizes, std::int64_t first, std::int64_t count);

/// Why `boxes` are no division of a tensor of `sizes`: one outside, two overlapping, or elements
/// in none. Empty where they are one.
std::string division_error(const Extent& sizes, std::vector<Box> boxes);

/// Calls visit(from, to, elements) for each contiguous run of `common`, in ascending order:
/// element positions in the row-major memories of the boxes `source` and `target`, which both
/// contain it.
template <class Visit>
void for_each_run(const Box& common, const Box& source, const Box& target, Visit visit) {
  const std::size_t dimensions = common.sizes.size();
  // The innermost dimensions that are whole in both boxes make one run.
  std::size_t inner = dimensions;
  std::int64_t run = 1;
  while (inner > 0) {
    --inner;
    run *= common.sizes[inner];
    if (common.sizes[inner] != source.sizes[inner] || common.sizes[inner] != target.sizes[inner])
      break;
  }
  Extent source_strides(dimensions, 1), target_strides(dimensions, 1);
  for (std::size_t d = dimensions; d-- > 1;) {
    source_strides[d - 1] = source_strides[d] * source.sizes[d];
    target_strides[d - 1] = target_strides[d] * target.sizes[d];
  }
  std::int64_t from = 0, to = 0;
  for (std::size_t d = 0; d < dimensions; ++d) {
    from += (common.offsets[d] - source.offsets[d]) * source_strides[d];
    to += (common.offsets[d] - target.offsets[d]) * target_strides[d];
  }
  if (run == 0) return;
  Extent at(inner, 0);
  for (;;) {
    visit(from, to, run);
    std::size_t d = inner;
    for (; d > 0; --d) {
      from += source_strides[d - 1];
      to += target_strides[d - 1];
      if (++at[d - 1] < common.sizes[d - 1]) break;
      from -= source_strides[d - 1] * common.sizes[d - 1];
      to -= target_strides[d - 1] * common.sizes[d - 1];
      at[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

}  // namespace muster::shards
