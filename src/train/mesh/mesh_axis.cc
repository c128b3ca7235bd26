// SPDX-License-Identifier: BSD-3-Clause
#include "train/mesh/mesh_axis.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace muster::mesh {

std::vector<MeshAxis> row_major_axes(const std::vector<int>& shape) {
  std::vector<MeshAxis> axes(shape.size());
  int stride = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    for (int i = 0; i < shape[dim]; ++i) axes[dim].push_back(i * stride);
    stride *= shape[dim];
  }
  return axes;
}

std::vector<int> shape_of(std::span<const MeshAxis> axes) {
  std::vector<int> shape;
  for (const auto& axis : axes) shape.push_back(static_cast<int>(axis.size()));
  return shape;
}

MeshAxis joined(std::span<const MeshAxis> axes) {
  MeshAxis all{0};
  for (const auto& axis : axes) {
    MeshAxis next;
    for (const int outer : all)
      for (const int inner : axis) next.push_back(outer + inner);
    all = std::move(next);
  }
  return all;
}

std::optional<std::vector<int>> origins(std::span<const MeshAxis> axes, int count) {
  const auto all = joined(axes);
  std::vector<bool> covered(static_cast<std::size_t>(count), false);
  std::vector<int> found;
  for (int origin = 0; origin < count; ++origin) {
    if (covered[static_cast<std::size_t>(origin)]) continue;
    for (const int offset : all) {
      const auto at = static_cast<std::size_t>(origin + offset);
      if (at >= covered.size() || covered[at]) return std::nullopt;
      covered[at] = true;
    }
    found.push_back(origin);
  }
  return found;
}

std::optional<std::vector<MeshAxis>> split(const MeshAxis& axis, const std::vector<int>& extents) {
  auto parts = row_major_axes(extents);
  if (std::accumulate(extents.begin(), extents.end(), std::size_t{1}, std::multiplies<>()) !=
      axis.size())
    return std::nullopt;
  for (auto& part : parts)
    for (auto& position : part) position = axis[static_cast<std::size_t>(position)];
  if (joined(parts) != axis) return std::nullopt;
  return parts;
}

std::vector<int> strides_of(const MeshAxis& axis) {
  std::vector<int> strides;
  for (std::size_t block = 1; block < axis.size();) {
    const int stride = axis[block];
    strides.insert(strides.begin(), stride);
    std::size_t repeats = 1;
    while (repeats * block < axis.size() &&
           axis[repeats * block] == static_cast<int>(repeats) * stride)
      ++repeats;
    block *= repeats;
  }
  return strides;
}

std::vector<int> coordinate_of(const std::vector<int>& shape, int index) {
  std::vector<int> coordinate(shape.size());
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    coordinate[dim] = index % shape[dim];
    index /= shape[dim];
  }
  return coordinate;
}

}  // namespace muster::mesh
