// SPDX-License-Identifier: BSD-3-Clause
/// The results that reductions must have, computed one element at a time with none of the engine's
/// loops.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/dtype.h"
#include "core/collective/op.h"

namespace muster::testing {

/// Reduces two elements that are numbers; NaN if one is NaN. Whole numbers wrap around.
template <class T>
T combine(collective::Reduce kind, T a, T b) {
  using collective::Reduce;
  if constexpr (std::is_floating_point_v<T>) {
    if (kind == Reduce::min) return std::isnan(a) ? a : std::isnan(b) ? b : (a < b ? a : b);
    if (kind == Reduce::max) return std::isnan(a) ? a : std::isnan(b) ? b : (a > b ? a : b);
    return kind == Reduce::product ? a * b : a + b;
  } else {
    using Wide = unsigned __int128;
    switch (kind) {
      case Reduce::product: return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
      case Reduce::min: return a < b ? a : b;
      case Reduce::max: return a > b ? a : b;
      case Reduce::band: return static_cast<T>(a & b);
      case Reduce::bor: return static_cast<T>(a | b);
      case Reduce::bxor: return static_cast<T>(a ^ b);
      default: return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    }
  }
}

/// `out = inputs[0] op inputs[1] op ...` in that order; `factors[r]` multiplies input r of a
/// premul_sum; an avg is divided by `divisor`, or by their number if that is 0.
void reduce_directly(MutableBytes out, std::span<const ConstBytes> inputs,
                     std::span<const double> factors, DType dtype, collective::Reduce reduce,
                     double divisor = 0);

/// The same for ranks numbered host by host, with the first rank of each: first within every host,
/// then of the hosts' results. An avg of 16-bit floats is divided on each host, by the number of
/// ranks on the largest, and in the end by the rest; others are divided once.
void reduce_by_hosts(MutableBytes out, std::span<const ConstBytes> inputs,
                     std::span<const double> factors, DType dtype, collective::Reduce reduce,
                     std::span<const int> first_ranks);

/// Fills with random elements of the type: every bit pattern of integers, bools from any byte,
/// floats of mixed size, now and then NaN.
void fill_elements(MutableBytes out, DType dtype, std::uint64_t seed);

/// Equal bits, but any NaN is as good as another. The index of the first element that differs, or
/// -1.
std::ptrdiff_t first_difference(ConstBytes a, ConstBytes b, DType dtype);
/// The same, but floats may differ as much as those of a few numbers that were added, or
/// multiplied, in another order.
std::ptrdiff_t first_difference_in_any_order(ConstBytes a, ConstBytes b, DType dtype);

}  // namespace muster::testing
