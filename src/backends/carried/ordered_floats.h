// SPDX-License-Identifier: BSD-3-Clause
/// Floats as integers of the same width and order, for libraries whose MIN and MAX of floats lose
/// NaN: as an integer, NaN is the least or the greatest of all.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace muster::carried {

template <class Float>
using OrderedInteger = std::conditional_t<sizeof(Float) == 4, std::int32_t, std::int64_t>;

/// In place; `data` need not be aligned. `largest`: for MAX.
template <class Float>
void order_floats(std::byte* data, std::size_t count, bool largest) {
  using Integer = OrderedInteger<Float>;
  using Limits = std::numeric_limits<Integer>;
  for (std::size_t i = 0; i < count; ++i, data += sizeof(Float)) {
    Float value;
    Integer bits;
    std::memcpy(&value, data, sizeof value);
    std::memcpy(&bits, data, sizeof bits);
    if (bits < 0) bits ^= Limits::max();
    if (std::isnan(value)) bits = largest ? Limits::max() : Limits::min();
    std::memcpy(data, &bits, sizeof bits);
  }
}

/// The inverse.
template <class Float>
void restore_floats(std::byte* data, std::size_t count) {
  using Integer = OrderedInteger<Float>;
  for (std::size_t i = 0; i < count; ++i, data += sizeof(Float)) {
    Integer bits;
    std::memcpy(&bits, data, sizeof bits);
    if (bits < 0) bits ^= std::numeric_limits<Integer>::max();
    std::memcpy(data, &bits, sizeof bits);
  }
}

}  // namespace muster::carried
