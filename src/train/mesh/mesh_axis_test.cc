// SPDX-License-Identifier: BSD-3-Clause
#include "train/mesh/mesh_axis.h"

#include <gtest/gtest.h>

namespace muster::mesh {
namespace {

using Values = std::vector<int>;

// spec: D6 flattening and slicing are arithmetic on the mesh's list of ranks
TEST(MeshAxis, JoinsAndDivides) {
  const auto axes = row_major_axes({2, 2, 3});
  EXPECT_EQ(shape_of(axes), (Values{2, 2, 3}));
  EXPECT_EQ(axes[1], (MeshAxis{0, 3}));
  EXPECT_EQ(joined({{axes[0], axes[2]}}), (MeshAxis{0, 1, 2, 6, 7, 8}));
  EXPECT_EQ(*origins({{axes[0], axes[2]}}, 12), (Values{0, 3}));
  EXPECT_EQ(*origins({{axes[1]}}, 12), (Values{0, 1, 2, 6, 7, 8}));
  EXPECT_EQ(*origins(axes, 12), (Values{0}));
  EXPECT_FALSE(origins({{axes[0], axes[0]}}, 12).has_value());
  EXPECT_FALSE(
      origins({{MeshAxis{0, 4, 8}, MeshAxis{0, 1, 2}}}, 12).has_value());  // no copy contains 3
  EXPECT_EQ(coordinate_of({2, 2, 3}, 7), (Values{1, 0, 1}));
}

// spec: D6 a dimension is cut into several, of several strides too
TEST(MeshAxis, Splits) {
  const auto axes = row_major_axes({2, 2, 3});
  EXPECT_EQ(*split(joined(axes), {2, 2, 3}), axes);
  const auto strided = joined({{axes[0], axes[2]}});
  EXPECT_EQ(*split(strided, {2, 3}), (std::vector<MeshAxis>{axes[0], axes[2]}));
  EXPECT_EQ(split(strided, {1, 6})->back(), strided);
  EXPECT_FALSE(split(strided, {3, 2}).has_value());
  EXPECT_FALSE(split(strided, {2, 2}).has_value());
}

// spec: D6 the strides that describe a dimension
TEST(MeshAxis, Strides) {
  const auto axes = row_major_axes({2, 2, 3});
  EXPECT_EQ(strides_of(axes[1]), Values{3});
  EXPECT_EQ(strides_of(joined(axes)), Values{1});
  EXPECT_EQ(strides_of(joined({{axes[0], axes[2]}})), (Values{6, 1}));
  EXPECT_EQ(strides_of({0}), Values{});
}

}  // namespace
}  // namespace muster::mesh
