// SPDX-License-Identifier: BSD-3-Clause
/// The functions that one compilation of `kernels_body.inc` provides to `kernels.cc`. Private to
/// the kernels.
#pragma once

#include <cstddef>

#include "core/base/dtype.h"
#include "core/collective/op.h"

namespace muster::collective::kernels {

/// If `divisor` > 0, divides (complex: both parts) before the only rounding.
using ReduceFunction = void (*)(std::byte* out, const std::byte* const* inputs,
                                std::size_t input_count, std::size_t count, double divisor);
using ScaleFunction = void (*)(std::byte* out, const std::byte* in, std::size_t count,
                               double factor);
using DivideFunction = void (*)(std::byte* data, std::size_t count, int divisor);

/// Null if a reduction is not defined. Complex rows count parts, not elements: the caller doubles
/// `count`.
struct Table {
  ReduceFunction reduce[kReducibleDTypes][kReduces];
  ScaleFunction scale[kReducibleDTypes];
  DivideFunction divide[kReducibleDTypes];
  void (*widen_half)(float*, const std::byte*, std::size_t);
  void (*widen_bfloat)(float*, const std::byte*, std::size_t);
  void (*narrow_half)(std::byte*, const float*, std::size_t);
  void (*narrow_bfloat)(std::byte*, const float*, std::size_t);
};

extern const Table baseline;
#if defined(__x86_64__)
extern const Table avx2;
extern const Table avx512;
#endif

}  // namespace muster::collective::kernels
