// SPDX-License-Identifier: BSD-3-Clause
/// Block formats for sending floats over slow links, and sums of values that arrive in them.
///
/// Values are encoded in blocks of 128. A block of int8 or int4 is a scale in bfloat16 and one code
/// per value; a value is code * scale, which float32 holds exactly. A block of bf16 has no scale.
/// 128 values take 256 bytes in bf16, 130 in int8 and 66 in int4.
///
/// Errors. With `m` the largest finite magnitude of the block, a finite value x decodes to within
///   bf16: |x| / 256       int8: m / 252       int4: m / 13.9
/// plus 2^-127. A block that has NaN or infinite values keeps them exactly, and the finite ones to
/// within m / 250 (int8) or m / 11.9 (int4). A finite value decodes to a finite one. Conversion to
/// a 16-bit tensor adds one rounding. Negative zero becomes zero in int8 and int4.
///
/// The loops are compiled for several instruction sets, selected on first use, and all compute the
/// same bits. Decoding int8 and int4 needs no subnormal float32, so modes that flush those to zero
/// change nothing. Results do not depend on alignment. Test it alone: `BlockCodec.*` in
/// muster_collective_test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/dtype.h"

namespace muster::collective {

enum class BlockFormat : std::uint8_t { bf16, int8, int4 };
inline constexpr int kBlockFormats = 3;

/// Values per block. The last block of a tensor may have fewer.
inline constexpr std::size_t kBlockValues = 128;

/// Bytes that encode `count` values. Any number of whole blocks is encoded contiguously, so values
/// from a multiple of kBlockValues on begin at `encoded_bytes` of that multiple.
std::size_t encoded_bytes(BlockFormat format, std::size_t count);

/// Whether values of the type can be encoded: float16, bfloat16 and float32.
bool can_encode(DType dtype);

void encode(std::byte* out, const std::byte* in, std::size_t count, DType dtype,
            BlockFormat format);
void decode(std::byte* out, const std::byte* in, std::size_t count, DType dtype,
            BlockFormat format);

/// The values of all members of a group that one member sums: its own, not encoded, and those that
/// it received.
struct EncodedParts {
  std::span<const std::byte* const> encoded;  ///< by member; entry `own` is not read
  std::size_t own = 0;                        ///< index of this member
  const std::byte* values = nullptr;          ///< its values, of type `dtype`
  std::size_t count = 0;
  DType dtype = DType::float32;
  BlockFormat format = BlockFormat::int8;
  float divisor = 1;  ///< the sums are divided by it before they are rounded
};
/// Sums in float32, in the order of members, and rounds once. A sum that `dtype` cannot hold
/// becomes infinite.
void sum_and_encode(std::byte* out, const EncodedParts& parts);
/// The same, but stores values of type `dtype`. `out` may be `parts.values`.
void sum_and_store(std::byte* out, const EncodedParts& parts);

}  // namespace muster::collective
