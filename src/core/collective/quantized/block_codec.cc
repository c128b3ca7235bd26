// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/quantized/block_codec.h"

#include <algorithm>
#include <cstring>

#include "core/collective/quantized/block_codec_table.h"

namespace muster::collective {
namespace {

using block_codec::CodecTable;

constexpr std::size_t kMostBlockBytes = kBlockValues * sizeof(float);  // of values or codes
constexpr std::size_t kScaleBytes = 2;

const CodecTable& codec_table() {
#if defined(__x86_64__)
  static const CodecTable& chosen =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
          ? block_codec::avx512
      : __builtin_cpu_supports("avx2") ? block_codec::avx2
                                       : block_codec::baseline;
  return chosen;
#else
  return block_codec::baseline;
#endif
}

int type_row(DType dtype) { return static_cast<int>(dtype) - static_cast<int>(DType::float16); }
static_assert(static_cast<int>(DType::bfloat16) == static_cast<int>(DType::float16) + 1 &&
              static_cast<int>(DType::float32) == static_cast<int>(DType::float16) + 2);

/// Bytes of one block of `count` values, at most kBlockValues.
std::size_t block_bytes(BlockFormat format, std::size_t count) {
  if (count == 0) return 0;
  switch (format) {
    case BlockFormat::bf16: return 2 * count;
    case BlockFormat::int8: return kScaleBytes + count;
    case BlockFormat::int4: return kScaleBytes + std::min(count, kBlockValues / 2);
  }
  return 0;
}

/// The functions for one type and format, on blocks of up to kBlockValues values. Those of the
/// table take whole blocks: a shorter one goes through a buffer that is padded with zeros.
class BlockCodec {
 public:
  BlockCodec(DType dtype, BlockFormat format)
      : row_(type_row(dtype)),
        column_(static_cast<int>(format)),
        width_(size_of(dtype)),
        format_(format) {}

  void load(float* values, const std::byte* in, std::size_t count) const {
    read(in, count * width_, count,
         [&](const std::byte* block) { table_.load[row_](values, block); });
  }
  void store(std::byte* out, const float* values, std::size_t count) const {
    write(out, count * width_, count, [&](std::byte* block) { table_.store[row_](block, values); });
  }
  void store_finite(std::byte* out, const float* values, std::size_t count) const {
    write(out, count * width_, count,
          [&](std::byte* block) { table_.store_finite[row_](block, values); });
  }
  void pack(std::byte* out, const float* values, std::size_t count) const {
    write(out, block_bytes(format_, count), count,
          [&](std::byte* block) { table_.pack[column_](block, values); });
  }
  void unpack(float* values, const std::byte* in, std::size_t count) const {
    read(in, block_bytes(format_, count), count,
         [&](const std::byte* block) { table_.unpack[column_](values, block); });
  }
  void add(float* sums, const float* values) const { table_.add(sums, values); }
  void divide(float* sums, float divisor) const { table_.divide(sums, divisor); }
  void overflow(float* values) const { table_.overflow[row_](values); }

 private:
  template <class Whole>
  static void read(const std::byte* in, std::size_t bytes, std::size_t count, Whole whole) {
    if (count == kBlockValues) return whole(in);
    alignas(64) std::byte padded[kMostBlockBytes] = {};
    std::memcpy(padded, in, bytes);
    whole(padded);
  }
  template <class Whole>
  static void write(std::byte* out, std::size_t bytes, std::size_t count, Whole whole) {
    if (count == kBlockValues) return whole(out);
    alignas(64) std::byte padded[kMostBlockBytes];
    whole(padded);
    std::memcpy(out, padded, bytes);
  }

  const CodecTable& table_ = codec_table();
  const int row_, column_;
  const std::size_t width_;
  const BlockFormat format_;
};

/// Calls `block(first, count)` for the blocks of `count` values.
template <class Block>
void for_each_block(std::size_t count, Block block) {
  for (std::size_t first = 0; first < count; first += kBlockValues)
    block(first, std::min(kBlockValues, count - first));
}

/// The sums of one block, before they are rounded.
void sum_block(float* sums, const BlockCodec& codec, const EncodedParts& parts, std::size_t first,
               std::size_t count) {
  alignas(64) float values[kBlockValues];
  const std::size_t offset = encoded_bytes(parts.format, first);
  for (std::size_t member = 0; member < parts.encoded.size(); ++member) {
    float* const to = member == 0 ? sums : values;
    if (member == parts.own)
      codec.load(to, parts.values + first * size_of(parts.dtype), count);
    else
      codec.unpack(to, parts.encoded[member] + offset, count);
    if (member != 0) codec.add(sums, values);
  }
  if (parts.divisor != 1) codec.divide(sums, parts.divisor);
}

}  // namespace

std::size_t encoded_bytes(BlockFormat format, std::size_t count) {
  return count / kBlockValues * block_bytes(format, kBlockValues) +
         block_bytes(format, count % kBlockValues);
}

bool can_encode(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32;
}

void encode(std::byte* out, const std::byte* in, std::size_t count, DType dtype,
            BlockFormat format) {
  const BlockCodec codec(dtype, format);
  for_each_block(count, [&](std::size_t first, std::size_t length) {
    alignas(64) float values[kBlockValues];
    codec.load(values, in + first * size_of(dtype), length);
    codec.pack(out + encoded_bytes(format, first), values, length);
  });
}

void decode(std::byte* out, const std::byte* in, std::size_t count, DType dtype,
            BlockFormat format) {
  const BlockCodec codec(dtype, format);
  for_each_block(count, [&](std::size_t first, std::size_t length) {
    alignas(64) float values[kBlockValues];
    codec.unpack(values, in + encoded_bytes(format, first), length);
    codec.store_finite(out + first * size_of(dtype), values, length);
  });
}

void sum_and_encode(std::byte* out, const EncodedParts& parts) {
  const BlockCodec codec(parts.dtype, parts.format);
  for_each_block(parts.count, [&](std::size_t first, std::size_t length) {
    alignas(64) float sums[kBlockValues];
    sum_block(sums, codec, parts, first, length);
    codec.overflow(sums);
    codec.pack(out + encoded_bytes(parts.format, first), sums, length);
  });
}

void sum_and_store(std::byte* out, const EncodedParts& parts) {
  const BlockCodec codec(parts.dtype, parts.format);
  for_each_block(parts.count, [&](std::size_t first, std::size_t length) {
    alignas(64) float sums[kBlockValues];
    sum_block(sums, codec, parts, first, length);
    codec.store(out + first * size_of(parts.dtype), sums, length);
  });
}

}  // namespace muster::collective
