// SPDX-License-Identifier: BSD-3-Clause
/// The functions that one compilation of `block_codec_body.inc` provides to `block_codec.cc`, each
/// for one whole block. Private to the block formats.
#pragma once

#include <cstddef>

#include "core/collective/quantized/block_codec.h"

namespace muster::collective::block_codec {

/// Rows of types in a table: float16, bfloat16, float32.
inline constexpr int kTypes = 3;

struct CodecTable {
  void (*load[kTypes])(float* values, const std::byte* in);
  /// Rounds. `store_finite` lets no finite value become infinite.
  void (*store[kTypes])(std::byte* out, const float* values);
  void (*store_finite[kTypes])(std::byte* out, const float* values);
  /// Makes values infinite that the type cannot hold.
  void (*overflow[kTypes])(float* values);
  void (*pack[kBlockFormats])(std::byte* out, const float* values);
  void (*unpack[kBlockFormats])(float* values, const std::byte* in);
  void (*add)(float* sums, const float* values);
  void (*divide)(float* sums, float divisor);
};

extern const CodecTable baseline;
#if defined(__x86_64__)
extern const CodecTable avx2;
extern const CodecTable avx512;
#endif

}  // namespace muster::collective::block_codec
