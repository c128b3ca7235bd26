// SPDX-License-Identifier: BSD-3-Clause
/// Elementwise reductions over plain memory, one per (dtype, reduction).
///
/// Any nonzero byte is a true bool, and results are 0 or 1: sum, max and bor are "or"; product,
/// min, band and avg (the share of trues, truncated) are "and"; bxor is parity. Integers wrap
/// around. The loops are compiled for several instruction sets, selected on first use, and without
/// contraction into fused operations, so every machine computes the same bits.
#pragma once

#include <cstddef>
#include <span>

#include "core/base/bytes.h"
#include "core/base/dtype.h"
#include "core/collective/op.h"
#include "muster/status.h"

namespace muster::collective {

/// The instruction set of the loops that this machine runs: "AVX-512", "AVX2" or "baseline".
const char* instruction_set();

/// Computes `out[i] = inputs[0][i] op inputs[1][i] op ...`, in the order of the inputs, for `count`
/// elements. `out` may be one of the inputs. 16-bit floats accumulate in float32 and round once;
/// min and max propagate NaN; avg and premul_sum add like sum (see `scale` and `finish_average`).
/// Results do not depend on alignment.
void reduce_many(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                 DType dtype, Reduce reduce);

/// The same, but an avg is divided by `divisor` before the only rounding, so 16-bit floats neither
/// round twice nor overflow in between. Integers are divided by its integer part.
void reduce_complete(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                     DType dtype, Reduce reduce, double divisor);
/// The same if `inputs` are those of all members: the result of a collective.
inline void reduce_complete(std::byte* out, std::span<const std::byte* const> inputs,
                            std::size_t count, DType dtype, Reduce reduce) {
  reduce_complete(out, inputs, count, dtype, reduce, static_cast<double>(inputs.size()));
}

/// Computes `out[i] = in[i] * factor`, before a premul_sum. For complex types both parts; for
/// integers in double, truncated.
void scale(std::byte* out, const std::byte* in, std::size_t count, DType dtype, double factor);
/// The division at the end of an avg, by `members`. Integers truncate towards zero.
void finish_average(std::byte* data, std::size_t count, DType dtype, int members);

/// Convert 16-bit floats to and from float32.
void widen(float* out, const std::byte* in, std::size_t count, DType dtype);
void narrow(std::byte* out, const float* in, std::size_t count, DType dtype);

}  // namespace muster::collective
