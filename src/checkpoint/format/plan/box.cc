// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/plan/box.h"

namespace muster::shards {

std::optional<std::int64_t> element_count(const Extent& sizes) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 62;
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) return {};
    if (size == 0) {
      empty = true;
    } else {
      if (count > kLimit / size) return {};
      count *= size;
    }
  }
  return empty ? 0 : count;
}

std::string text_of(const Extent& extent) {
  std::string text = "[";
  for (const std::int64_t each : extent)
    text += (text.size() > 1 ? ", " : "") + std::to_string(each);
  return text + "]";
}

std::int64_t Box::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

bool Box::is_within(const Extent& whole) const {
  if (offsets.size() != whole.size() || sizes.size() != whole.size()) return false;
  for (std::size_t d = 0; d < whole.size(); ++d)
    if (offsets[d] < 0 || sizes[d] < 0 || sizes[d] > whole[d] || offsets[d] > whole[d] - sizes[d])
      return false;
  return true;
}

Box box_of(const Extent& sizes) { return {Extent(sizes.size(), 0), sizes}; }

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box common = a;
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return {};
    common.offsets[d] = begin;
    common.sizes[d] = end - begin;
  }
  return common;
}

namespace {

/// Boxes of [first, last) in the tensor that `prefix` leaves over from dimension `d` on.
void cut(const Extent& sizes, const Extent& prefix, std::size_t d, std::int64_t first,
         std::int64_t last, std::vector<Box>& boxes) {
  if (first >= last) return;
  const auto add = [&](std::int64_t begin, std::int64_t count) {
    Box box{prefix, Extent(prefix.size(), 1)};
    box.offsets.push_back(begin);
    box.sizes.push_back(count);
    for (std::size_t inner = d + 1; inner < sizes.size(); ++inner) {
      box.offsets.push_back(0);
      box.sizes.push_back(sizes[inner]);
    }
    boxes.push_back(std::move(box));
  };
  std::int64_t row = 1;
  for (std::size_t inner = d + 1; inner < sizes.size(); ++inner) row *= sizes[inner];
  const auto part_of_row = [&](std::int64_t at, std::int64_t begin, std::int64_t end) {
    Extent deeper = prefix;
    deeper.push_back(at);
    cut(sizes, deeper, d + 1, begin, end, boxes);
  };
  const std::int64_t first_row = first / row, last_row = last / row;
  if (first_row == last_row) return part_of_row(first_row, first % row, last % row);
  std::int64_t whole_from = first_row;
  if (first % row != 0) {
    part_of_row(first_row, first % row, row);
    ++whole_from;
  }
  if (whole_from < last_row) add(whole_from, last_row - whole_from);
  if (last % row != 0) part_of_row(last_row, 0, last % row);
}

}  // namespace

std::vector<Box> boxes_of_stretch(const Extent& sizes, std::int64_t first, std::int64_t count) {
  if (count <= 0) return {};
  if (sizes.empty()) return {box_of(sizes)};
  std::vector<Box> boxes;
  cut(sizes, {}, 0, first, first + count, boxes);
  return boxes;
}

std::string division_error(const Extent& sizes, std::vector<Box> boxes) {
  const auto whole = element_count(sizes);
  if (!whole) return "the sizes " + text_of(sizes) + " are not those of a tensor";
  std::int64_t covered = 0;
  for (const Box& box : boxes) {
    if (!box.is_within(sizes))
      return "the piece at " + text_of(box.offsets) + " of sizes " + text_of(box.sizes) +
             " is outside of the tensor's " + text_of(sizes);
    covered += box.elements();  // each at most 2^62, and refused below before a sum could pass 2^63
    if (covered > *whole)
      return "its pieces overlap: together they have more than its " + std::to_string(*whole) +
             " elements";
  }
  // By their first dimension: only boxes that overlap there can overlap at all.
  std::sort(boxes.begin(), boxes.end());
  for (std::size_t i = 0; i < boxes.size(); ++i)
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      if (!sizes.empty() && boxes[j].offsets[0] >= boxes[i].offsets[0] + boxes[i].sizes[0]) break;
      if (intersection(boxes[i], boxes[j]))
        return "the pieces at " + text_of(boxes[i].offsets) + " and " + text_of(boxes[j].offsets) +
               " overlap";
    }
  if (covered < *whole)
    return "its pieces have " + std::to_string(covered) + " of its " + std::to_string(*whole) +
           " elements";
  return {};
}

}  // namespace muster::shards
