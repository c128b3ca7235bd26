// SPDX-License-Identifier: BSD-3-Clause
/// Dimensions of a mesh as arithmetic on the list of ranks the mesh was constructed from. No
/// communication.
///
/// Flattened and split dimensions have no single stride, so an axis lists its offsets. Slicing
/// picks axes, flattening joins them, and every part of a mesh indexes the same list of ranks.
/// torch's equivalent is `torch.distributed._mesh_layout` (CuTe layouts).
#pragma once

#include <optional>
#include <span>
#include <vector>

namespace muster::mesh {

/// Offset of each position along a dimension in the list of ranks, relative to the first; the first
/// entry is 0. Equal dimensions have equal lists.
using MeshAxis = std::vector<int>;

/// The axes of a row-major array; extents are at least 1.
std::vector<MeshAxis> row_major_axes(const std::vector<int>& shape);

std::vector<int> shape_of(std::span<const MeshAxis> axes);

/// All combined positions of the axes in row-major order: the axis that flattening makes of them.
MeshAxis joined(std::span<const MeshAxis> axes);

/// Start offsets, ascending, of the copies of the axes that together cover a list of `count` ranks
/// exactly once. Empty if there are none, because the axes overlap or leave gaps.
std::optional<std::vector<int>> origins(std::span<const MeshAxis> axes, int count);

/// Splits the axis in row-major order into axes of the given extents, whose product is its length.
/// Empty if its offsets cannot be split that way.
std::optional<std::vector<MeshAxis>> split(const MeshAxis& axis, const std::vector<int>& extents);

/// The shortest list of strides, outermost first, that generates the axis; empty for a single
/// position.
std::vector<int> strides_of(const MeshAxis& axis);

/// The row-major coordinate of entry number `index` of an array.
std::vector<int> coordinate_of(const std::vector<int>& shape, int index);

}  // namespace muster::mesh
