/// Elementwise reductions over plain memory, one for every (dtype, reduction).
///
/// Any byte but 0 is a true bool, and results are 0 or 1: sum, max and bor are "or"; product, min,
/// band and avg (the share of trues, truncated) are "and"; bxor tells whether an odd number is
/// true. Integers wrap around. The loops are compiled for several instruction sets, picked when
/// first used, without contraction into fused operations: every machine computes the same bits.
#pragma once

#include <cstddef>
#include <span>

#include "muster/base/bytes.h"
#include "muster/base/dtype.h"
#include "muster/base/status.h"
#include "muster/collective/op.h"

namespace muster::collective {

/// `out[i] = inputs[0][i] op inputs[1][i] op ...`, in the order of the inputs, for `count`
/// elements. `out` may be one of the inputs. 16-bit floats accumulate in float32 and round once;
/// min and max pass NaN on; avg and premul_sum add like sum (see `scale` and `finish`). Bitwise the
/// same whatever the alignment.
void reduce_many(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                 DType dtype, Reduce reduce);

/// The same where `inputs` are those of all members: what a collective returns. An avg is divided
/// by their number before the one rounding, so 16-bit floats neither round twice nor overflow on
/// the way.
void reduce_complete(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                     DType dtype, Reduce reduce);

/// `data[i] *= factor` before a premul_sum; for complex types both parts; for integers in double,
/// truncated.
void scale(std::byte* out, const std::byte* in, std::size_t count, DType dtype, double factor);
/// The division at the end of an avg: by `members`; integers truncate towards zero.
void finish_average(std::byte* data, std::size_t count, DType dtype, int members);

/// 16-bit floats to and from float32, for partial sums that travel wide between hosts.
void widen(float* out, const std::byte* in, std::size_t count, DType dtype);
void narrow(std::byte* out, const float* in, std::size_t count, DType dtype);

}  // namespace muster::collective
