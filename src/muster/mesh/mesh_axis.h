/// Dimensions of a mesh as arithmetic on the list of ranks that the mesh was made of. Talks to
/// nobody.
///
/// Flattened and split dimensions have no single stride, so an axis lists its offsets. Slicing
/// picks axes, flattening joins them, and every part of a mesh keeps indexing the one list of
/// ranks. The equivalent in torch is `torch.distributed._mesh_layout` (CuTe layouts).
#pragma once

#include <optional>
#include <span>
#include <vector>

namespace muster::mesh {

/// How far each position along a dimension is from the first one in the list of ranks; the first
/// entry is 0. Equal dimensions have equal lists.
using MeshAxis = std::vector<int>;

/// The axes of a row-major array. Its extents are at least 1.
std::vector<MeshAxis> row_major_axes(const std::vector<int>& shape);

std::vector<int> shape_of(std::span<const MeshAxis> axes);

/// All positions of the axes together, in row-major order: the axis that flattening makes of them.
MeshAxis joined(std::span<const MeshAxis> axes);

/// Where the copies of the axes begin that together cover a list of `count` ranks, each once, in
/// ascending order. Absent where they cannot: the axes overlap, or leave gaps that no copy fills.
std::optional<std::vector<int>> origins(std::span<const MeshAxis> axes, int count);

/// The axis as several of the given extents (row-major), whose product is its own. Absent where its
/// offsets cannot be cut so.
std::optional<std::vector<MeshAxis>> split(const MeshAxis& axis, const std::vector<int>& extents);

/// The fewest strides, the outermost first, that make up the axis; none for a single position.
std::vector<int> strides_of(const MeshAxis& axis);

/// The row-major coordinate of entry number `index` of an array.
std::vector<int> coordinate_of(const std::vector<int>& shape, int index);

}  // namespace muster::mesh
