/// The results that reductions must have, computed one element at a time with none of the engine's loops.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/dtype.h"
#include "muster/collective/op.h"

namespace muster::testing {

/// `out = inputs[0] op inputs[1] op ...` in that order; `factors[r]` multiplies input r of a premul_sum; an avg is divided by their number.
void reduce_directly(MutableBytes out, std::span<const ConstBytes> inputs, std::span<const double> factors, DType dtype,
                     collective::Reduce reduce);

/// Fills with random elements of the type: every bit pattern of integers, bools from any byte, floats of mixed size, now and then NaN.
void fill_elements(MutableBytes out, DType dtype, std::uint64_t seed);

/// Equal bits, but any NaN is as good as another. The index of the first element that differs, or -1.
std::ptrdiff_t first_difference(ConstBytes a, ConstBytes b, DType dtype);

}  // namespace muster::testing
