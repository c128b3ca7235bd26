// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/quantized/block_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/kernels/kernels.h"
#include "core/collective/quantized/block_codec_table.h"

namespace muster::collective {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr BlockFormat kFormats[] = {BlockFormat::bf16, BlockFormat::int8, BlockFormat::int4};
constexpr DType kTypes[] = {DType::float16, DType::bfloat16, DType::float32};

using Floats = std::vector<float>;
using Raw = std::vector<std::byte>;

std::string title(BlockFormat format, DType dtype) {
  const char* const names[] = {"bf16 of ", "int8 of ", "int4 of "};
  return names[static_cast<int>(format)] + std::string(name_of(dtype));
}

/// The values as elements of a type, rounded, and back.
Raw elements(const Floats& values, DType dtype) {
  Raw raw(values.size() * size_of(dtype));
  if (raw.empty()) return raw;
  if (dtype == DType::float32)
    std::memcpy(raw.data(), values.data(), raw.size());
  else
    narrow(raw.data(), values.data(), values.size(), dtype);
  return raw;
}
Floats numbers(const Raw& raw, DType dtype) {
  Floats values(raw.size() / size_of(dtype));
  if (raw.empty()) return values;
  if (dtype == DType::float32)
    std::memcpy(values.data(), raw.data(), raw.size());
  else
    widen(values.data(), raw.data(), values.size(), dtype);
  return values;
}

Raw encoded(const Floats& values, DType dtype, BlockFormat format) {
  Raw out(encoded_bytes(format, values.size()));
  encode(out.data(), elements(values, dtype).data(), values.size(), dtype, format);
  return out;
}
Floats round_trip(const Floats& values, DType dtype, BlockFormat format) {
  Raw out(values.size() * size_of(dtype));
  decode(out.data(), encoded(values, dtype, format).data(), values.size(), dtype, format);
  return numbers(out, dtype);
}

/// The bound of block_codec.h for one value, and the rounding of a 16-bit tensor.
double bound(BlockFormat format, DType dtype, double value, double largest, bool marked) {
  const double tensor = dtype == DType::float32    ? 0
                        : dtype == DType::bfloat16 ? std::ldexp(1.004 * largest, -8)
                                                   : std::ldexp(1.1 * largest, -11) + 0x1p-25;
  const double block = format == BlockFormat::bf16   ? std::abs(value) / 256
                       : format == BlockFormat::int8 ? largest / (marked ? 250 : 252)
                                                     : largest / (marked ? 11.9 : 13.9);
  return block + (format == BlockFormat::bf16 && dtype != DType::float16 ? 0 : tensor) + 0x1p-127;
}

void expect_within_bound(const Floats& given, DType dtype, BlockFormat format) {
  const Floats values = numbers(elements(given, dtype), dtype);
  const Floats back = round_trip(values, dtype, format);
  for (std::size_t first = 0; first < values.size(); first += kBlockValues) {
    const std::size_t last = std::min(first + kBlockValues, values.size());
    double largest = 0;
    bool marked = false;
    for (std::size_t i = first; i < last; ++i) {
      if (std::isfinite(values[i]))
        largest = std::max(largest, std::abs(static_cast<double>(values[i])));
      else
        marked = true;
    }
    for (std::size_t i = first; i < last; ++i) {
      if (!std::isfinite(values[i])) {
        ASSERT_TRUE(std::isnan(values[i]) ? std::isnan(back[i]) : back[i] == values[i])
            << title(format, dtype) << " element " << i << ": " << back[i] << " for " << values[i];
        continue;
      }
      const double error = std::abs(static_cast<double>(back[i]) - static_cast<double>(values[i]));
      ASSERT_TRUE(std::isfinite(back[i]) &&
                  error <= bound(format, dtype, values[i], largest, marked))
          << title(format, dtype) << " element " << i << ": " << back[i] << " for " << values[i]
          << " in a block up to " << largest;
    }
  }
}

Floats normal(std::size_t count, float scale, std::mt19937& random) {
  std::normal_distribution<float> draw;
  Floats values(count);
  for (float& value : values) value = draw(random) * scale;
  return values;
}

/// Blocks that are hard for a shared scale.
std::vector<Floats> adversarial_blocks() {
  std::mt19937 random(17);
  std::vector<Floats> blocks;
  for (const float value : {0.0f, -0.0f, 1.0f, -3.7f, 1e-45f, 1e-40f, -0x1p-126f, kMax, -kMax,
                            65504.0f, 1.996f, 0x1.01p0f, 0x1.03p0f})
    blocks.emplace_back(kBlockValues, value);
  for (const float outlier : {1e6f, -1e30f, kMax, 60000.0f}) {  // one outlier among ordinary values
    blocks.push_back(normal(kBlockValues, 1, random));
    blocks.back()[77] = outlier;
  }
  for (const float scale : {1e-45f, 1e-42f, 0x1p-127f, 0x1p-120f, 1e-20f, 1e-3f, 1.0f, 1e4f, 1e30f})
    blocks.push_back(normal(kBlockValues, scale, random));
  blocks.emplace_back();
  for (std::size_t i = 0; i < kBlockValues; ++i)  // every code of int8, and ties between them
    blocks.back().push_back(static_cast<float>(i) - 63.5f);
  blocks.emplace_back();
  for (std::size_t i = 0; i < kBlockValues; ++i)  // all magnitudes
    blocks.back().push_back(std::ldexp(i % 2 == 0 ? 1.7f : -1.3f, static_cast<int>(2 * i) - 148));
  return blocks;
}

// spec: X1 stated error: all equal, zeros, denormals, one outlier, the largest values
TEST(BlockCodec, KeepsItsErrorBoundOnAdversarialBlocks) {
  for (const Floats& block : adversarial_blocks())
    for (const DType dtype : kTypes)
      for (const BlockFormat format : kFormats) expect_within_bound(block, dtype, format);
}

// spec: X1 stated error: scales from the whole range of float32, random mantissas
TEST(BlockCodec, KeepsItsErrorBoundOnRandomBlocks) {
  std::mt19937 random(23);
  const auto draw = [&] { return static_cast<std::uint32_t>(random()); };
  for (int repeat = 0; repeat < 300; ++repeat) {
    Floats values(kBlockValues);
    const std::uint32_t top = draw() % 255;  // the largest exponent
    for (float& value : values) {
      const std::uint32_t exponent = top - std::min(top, draw() % 9);
      value = std::bit_cast<float>((draw() & 0x807fffffu) | exponent << 23);
    }
    for (const DType dtype : kTypes)
      for (const BlockFormat format : kFormats) expect_within_bound(values, dtype, format);
    if (HasFatalFailure()) return;
  }
}

// spec: X1 NaN and infinite values arrive exactly, also beside finite ones and alone
TEST(BlockCodec, CarriesNanAndInfiniteValues) {
  std::mt19937 random(29);
  for (Floats block : adversarial_blocks()) {
    for (const float special : {kInf, -kInf, kNan, -kNan}) {
      block[random() % kBlockValues] = special;
      for (const DType dtype : kTypes)
        for (const BlockFormat format : kFormats) expect_within_bound(block, dtype, format);
    }
  }
  for (const float special : {kInf, -kInf, kNan})
    for (const BlockFormat format : kFormats)
      expect_within_bound(Floats(kBlockValues + 3, special), DType::float32, format);
}

TEST(BlockCodec, ZerosStayZeros) {
  for (const BlockFormat format : kFormats)
    for (const float value : round_trip(Floats(300, 0.0f), DType::float32, format))
      ASSERT_EQ(value, 0.0f);
}

// The sizes of block_codec.h, and every length around a block: nothing behind the end is written.
TEST(BlockCodec, EveryLengthTakesTheBytesItSays) {
  EXPECT_EQ(encoded_bytes(BlockFormat::bf16, 128), 256u);
  EXPECT_EQ(encoded_bytes(BlockFormat::int8, 128), 130u);
  EXPECT_EQ(encoded_bytes(BlockFormat::int4, 128), 66u);
  EXPECT_EQ(encoded_bytes(BlockFormat::int8, 0), 0u);
  std::mt19937 random(31);
  const Floats values = normal(3 * kBlockValues, 1, random);
  for (std::size_t count = 0; count <= 2 * kBlockValues + 1; ++count) {
    const Floats given(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count));
    for (const BlockFormat format : kFormats) {
      expect_within_bound(given, DType::float32, format);
      const std::size_t bytes = encoded_bytes(format, count);
      Raw out(bytes + 8, std::byte{0x5a});
      encode(out.data(), elements(given, DType::float16).data(), count, DType::float16, format);
      ASSERT_TRUE(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(bytes), out.end(),
                              [](std::byte b) { return b == std::byte{0x5a}; }))
          << count;
      Raw back(2 * count + 8, std::byte{0x5a});
      decode(back.data(), out.data(), count, DType::float16, format);
      ASSERT_TRUE(std::all_of(back.end() - 8, back.end(), [](std::byte b) {
        return b == std::byte{0x5a};
      })) << count;
    }
  }
}

// Whole blocks are encoded alike wherever a tensor is cut.
TEST(BlockCodec, PartsOfWholeBlocksAreTheBytesOfTheWhole) {
  std::mt19937 random(37);
  const Floats values = normal(5 * kBlockValues + 9, 3, random);
  for (const BlockFormat format : kFormats) {
    const Raw whole = encoded(values, DType::float32, format);
    const Floats head(values.begin(), values.begin() + 2 * kBlockValues);
    const Floats tail(values.begin() + 2 * kBlockValues, values.end());
    Raw parts = encoded(head, DType::float32, format);
    const Raw rest = encoded(tail, DType::float32, format);
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(parts, whole);
  }
}

TEST(BlockCodec, AlignmentChangesNothing) {
  std::mt19937 random(41);
  const Floats values = normal(400, 2, random);
  for (const DType dtype : kTypes) {
    for (const BlockFormat format : kFormats) {
      const Raw raw = elements(values, dtype), expected = encoded(values, dtype, format);
      Raw in(raw.size() + 1), out(expected.size() + 3);
      std::copy(raw.begin(), raw.end(), in.begin() + 1);
      encode(out.data() + 3, in.data() + 1, values.size(), dtype, format);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out.begin() + 3));
      Raw back(raw.size() + 1);
      decode(back.data() + 1, out.data() + 3, values.size(), dtype, format);
      EXPECT_EQ(numbers(Raw(back.begin() + 1, back.end()), dtype),
                round_trip(values, dtype, format));
    }
  }
}

struct CodecSet {
  const char* name;
  const block_codec::CodecTable* table;
};
std::vector<CodecSet> codec_sets() {
  std::vector<CodecSet> sets{{"baseline", &block_codec::baseline}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) sets.push_back({"avx2", &block_codec::avx2});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    sets.push_back({"avx512", &block_codec::avx512});
#endif
  return sets;
}

/// The concatenated results of every function of a table on one block.
Raw codec_results(const block_codec::CodecTable& table, const Floats& block) {
  Raw all;
  const auto keep = [&all](const auto& values) {
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    all.insert(all.end(), bytes, bytes + values.size() * sizeof values[0]);
  };
  for (int row = 0; row < block_codec::kTypes; ++row) {
    for (const auto store : {table.store[row], table.store_finite[row]}) {
      Raw stored(4 * kBlockValues);
      store(stored.data(), block.data());
      keep(stored);
      Floats loaded(kBlockValues);
      table.load[row](loaded.data(), stored.data());
      keep(loaded);
    }
    Floats values = block;
    table.overflow[row](values.data());
    keep(values);
  }
  for (int column = 0; column < kBlockFormats; ++column) {
    Raw packed(4 * kBlockValues);
    table.pack[column](packed.data(), block.data());
    keep(packed);
    Floats sums(kBlockValues);
    table.unpack[column](sums.data(), packed.data());
    keep(sums);
    table.add(sums.data(), block.data());
    table.divide(sums.data(), 3.0f);
    for (float& value : sums)  // which of two NaNs results is up to the compiler
      if (std::isnan(value)) value = kNan;
    keep(sums);
  }
  return all;
}

// spec: X1 the same bits from plain C++, AVX2 and AVX-512
TEST(BlockCodec, EveryInstructionSetComputesTheSameBits) {
  std::mt19937 random(43);
  auto blocks = adversarial_blocks();
  for (int repeat = 0; repeat < 200; ++repeat) {
    Floats any(kBlockValues);
    for (float& value : any) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    blocks.push_back(any);
    blocks.push_back(
        normal(kBlockValues, std::ldexp(1.0f, static_cast<int>(random() % 200) - 100), random));
  }
  const auto sets = codec_sets();
  for (const Floats& block : blocks) {
    const Raw expected = codec_results(*sets.front().table, block);
    for (const CodecSet& set : sets) {
      const Raw results = codec_results(*set.table, block);
      const auto at = std::mismatch(results.begin(), results.end(), expected.begin()).first;
      ASSERT_TRUE(at == results.end())
          << set.name << " differs at byte " << at - results.begin() << " of all results";
    }
  }
}

/// Members' values of one part, encoded by each but `own`.
struct Members {
  Members(std::size_t count, std::size_t own, std::vector<Floats> given, DType dtype,
          BlockFormat format)
      : values(std::move(given)), mine(elements(values[own], dtype)) {
    for (const Floats& one : values) messages.push_back(encoded(one, dtype, format));
    for (const Raw& message : messages) pointers.push_back(message.data());
    pointers[own] = nullptr;
    parts = {.encoded = pointers,
             .own = own,
             .values = mine.data(),
             .count = count,
             .dtype = dtype,
             .format = format};
  }
  std::vector<Floats> values;
  Raw mine;
  std::vector<Raw> messages;
  std::vector<const std::byte*> pointers;
  EncodedParts parts;
};

// spec: X1 fp32 sums, one rounding per hop: the sum of decoded values, rounded once
TEST(BlockCodec, SumsInFloat32AndRoundsOnce) {
  std::mt19937 random(47);
  constexpr std::size_t kCount = 2 * kBlockValues + 31;
  for (const DType dtype : kTypes) {
    for (const BlockFormat format : kFormats) {
      for (const std::size_t own : {0u, 1u, 2u}) {
        Members members(
            kCount, own,
            {normal(kCount, 1, random), normal(kCount, 2, random), normal(kCount, 3, random)},
            dtype, format);
        for (const float divisor : {1.0f, 3.0f}) {
          members.parts.divisor = divisor;
          Floats sums;
          for (std::size_t member = 0; member < 3; ++member) {
            Floats wide(kCount);
            decode(reinterpret_cast<std::byte*>(wide.data()), members.messages[member].data(),
                   kCount, DType::float32, format);
            if (member == own) wide = numbers(members.mine, dtype);
            if (member == 0) sums.resize(kCount, 0);
            for (std::size_t i = 0; i < kCount; ++i)
              sums[i] = member == 0 ? wide[i] : sums[i] + wide[i];
          }
          for (float& sum : sums) sum /= divisor;
          Raw stored(kCount * size_of(dtype));
          sum_and_store(stored.data(), members.parts);
          ASSERT_EQ(stored, elements(sums, dtype)) << title(format, dtype);
          Raw message(encoded_bytes(format, kCount));
          sum_and_encode(message.data(), members.parts);
          ASSERT_EQ(message, encoded(sums, DType::float32, format)) << title(format, dtype);
        }
      }
    }
  }
}

// Sums overflow as an ordinary reduction does, and decoding makes no finite value infinite.
TEST(BlockCodec, OnlySumsBeyondTheTypeBecomeInfinite) {
  for (const BlockFormat format : kFormats) {
    for (const auto& [dtype, largest] :
         {std::pair(DType::float16, 65504.0f), std::pair(DType::bfloat16, 0x1.fep127f),
          std::pair(DType::float32, kMax)}) {
      const std::size_t count = kBlockValues;
      Members twice(count, 0, {Floats(count, largest), Floats(count, largest)}, dtype, format);
      Raw message(encoded_bytes(format, count));
      Raw out(count * size_of(dtype));
      sum_and_encode(message.data(), twice.parts);
      decode(out.data(), message.data(), count, dtype, format);
      EXPECT_EQ(numbers(out, dtype), Floats(count, kInf)) << title(format, dtype);
      sum_and_store(out.data(), twice.parts);
      EXPECT_EQ(numbers(out, dtype), Floats(count, kInf)) << title(format, dtype);
      expect_within_bound(Floats(count, largest), dtype, format);
    }
  }
}

}  // namespace
}  // namespace muster::collective
