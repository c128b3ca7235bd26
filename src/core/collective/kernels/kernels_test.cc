// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/collective/kernels/kernels_table.h"
#include "testing/direct_reduction.h"

namespace muster::collective {
namespace {

#if defined(__SANITIZE_THREAD__)  // no races to find in a single thread
constexpr std::size_t kBig = 2311;
#else
constexpr std::size_t kBig = 9001;  // more than one block of every type, and prime
#endif

float half_value(std::uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const int mantissa = half & 1023;
  const float sign = (half & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31)
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

std::uint16_t narrowed(DType dtype, float value) {
  std::uint16_t out = 0;
  narrow(reinterpret_cast<std::byte*>(&out), &value, 1, dtype);
  return out;
}
float widened(DType dtype, std::uint16_t value) {
  float out = 0;
  widen(&out, reinterpret_cast<const std::byte*>(&value), 1, dtype);
  return out;
}

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b)
                       : std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// spec: F15 16-bit floats: all 65,536 halves widen exactly and come back
TEST(Kernels, EveryHalfConverts) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = widened(DType::float16, half);
    ASSERT_TRUE(same(value, half_value(half))) << bits;
    const std::uint16_t back = narrowed(DType::float16, value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(half_value(back)));
    } else {
      ASSERT_EQ(back, half);
    }
  }
}

TEST(Kernels, EveryBfloatConverts) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto narrow_bits = static_cast<std::uint16_t>(bits);
    const float expected = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    const float value = widened(DType::bfloat16, narrow_bits);
    ASSERT_TRUE(same(value, expected)) << bits;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(widened(DType::bfloat16, narrowed(DType::bfloat16, value))));
    } else {
      ASSERT_EQ(narrowed(DType::bfloat16, value), narrow_bits);
    }
  }
}

// For every two neighbours: the midpoint rounds to the even one, values beside it to the nearer
// one.
void check_rounding(DType dtype, int largest_finite) {
  for (int bits = 0; bits < largest_finite; ++bits) {
    const float low = widened(dtype, static_cast<std::uint16_t>(bits));
    const float high = widened(dtype, static_cast<std::uint16_t>(bits + 1));
    const float middle =
        static_cast<float>((static_cast<double>(low) + static_cast<double>(high)) / 2);
    if (!(low < middle && middle < high))
      continue;  // the smallest subnormal bfloat16 neighbours have a value between them
    const int even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(narrowed(dtype, middle), even) << bits;
    ASSERT_EQ(narrowed(dtype, -middle), even | 0x8000) << bits;
    ASSERT_EQ(narrowed(dtype, std::nextafter(middle, low)), bits);
    ASSERT_EQ(narrowed(dtype, std::nextafter(middle, high)), bits + 1);
  }
}

// spec: F15 round once: to nearest, ties to even, over every half
TEST(Kernels, HalvesRoundToNearestEven) {
  check_rounding(DType::float16, 0x7bff);
  EXPECT_EQ(narrowed(DType::float16, 65519.0f), 0x7bff);
  EXPECT_EQ(narrowed(DType::float16, 65520.0f), 0x7c00);
  EXPECT_EQ(narrowed(DType::float16, 1e30f), 0x7c00);
  EXPECT_EQ(narrowed(DType::float16, -std::numeric_limits<float>::infinity()), 0xfc00);
  EXPECT_EQ(narrowed(DType::float16, 1e-30f), 0);
  EXPECT_EQ(narrowed(DType::float16, -0.0f), 0x8000);
}

TEST(Kernels, BfloatsRoundToNearestEven) {
  check_rounding(DType::bfloat16, 0x7f7f);
  EXPECT_EQ(narrowed(DType::bfloat16, std::numeric_limits<float>::max()), 0x7f80);
}

// Compared with a direct computation: one element at a time, in the order of the inputs, without
// any kernel code.
using testing::combine;

template <class T>
void check_plain(DType dtype, Reduce kind, int inputs, std::size_t count, std::mt19937_64& random,
                 const char* set, kernels::ReduceFunction function) {
  std::vector<std::vector<T>> data(inputs, std::vector<T>(count));
  std::vector<const std::byte*> pointers;
  for (auto& input : data) {
    for (T& value : input) {
      if constexpr (std::is_floating_point_v<T>) {
        value = random() % 50 == 0
                    ? std::numeric_limits<T>::quiet_NaN()
                    : static_cast<T>(static_cast<std::int64_t>(random() % 2001) - 1000) / T(7);
      } else {
        value = static_cast<T>(random());
      }
    }
    pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  }
  std::vector<T> expected = data[0];
  for (int k = 1; k < inputs; ++k) {
    for (std::size_t i = 0; i < count; ++i) expected[i] = combine<T>(kind, expected[i], data[k][i]);
  }
  // Into the last input's memory: the output may be one of the inputs.
  auto* out = reinterpret_cast<std::byte*>(data[inputs - 1].data());
  function(out, pointers.data(), pointers.size(), count, 0);
  for (std::size_t i = 0; i < count; ++i) {
    const T value = data[inputs - 1][i];
    const bool both_nan = value != value && expected[i] != expected[i];
    ASSERT_TRUE(both_nan || std::memcmp(&value, &expected[i], sizeof value) == 0)
        << set << " " << name_of(kind) << " " << name_of(dtype) << " inputs " << inputs
        << " element " << i << ": " << +value << " not " << +expected[i];
  }
}

struct Set {
  const char* name;
  const kernels::Table* table;
};
std::vector<Set> instruction_sets() {
  std::vector<Set> sets{{"baseline", &kernels::baseline}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) sets.push_back({"avx2", &kernels::avx2});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    sets.push_back({"avx512", &kernels::avx512});
  }
#endif
  return sets;
}

// spec: F14 SUM PRODUCT MIN MAX BAND BOR BXOR
// spec: F15 int8 to int64, uint8, float32, float64; MIN and MAX pass NaN on
TEST(Kernels, EveryPlainReductionMatchesADirectComputation) {
  std::mt19937_64 random(7);
  for (const Set& set : instruction_sets()) {
    for (int inputs : {1, 2, 3, 5, 8}) {
      for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17}, kBig}) {
        for (int kind_number = 0; kind_number < kReduces; ++kind_number) {
          const auto kind = static_cast<Reduce>(kind_number);
          const auto run = [&]<class T>(DType dtype, T) {
            if (!reduce_supports(kind, dtype)) return;
            const auto function = set.table->reduce[static_cast<int>(dtype)][kind_number];
            ASSERT_NE(function, nullptr);
            check_plain<T>(dtype, kind, inputs, count, random, set.name, function);
          };
          run(DType::uint8, std::uint8_t{});
          run(DType::int8, std::int8_t{});
          run(DType::int16, std::int16_t{});
          run(DType::int32, std::int32_t{});
          run(DType::int64, std::int64_t{});
          run(DType::float32, float{});
          run(DType::float64, double{});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// spec: F15 16-bit floats accumulate in float32 and round once
TEST(Kernels, SixteenBitFloatsRoundOnce) {
  std::mt19937_64 random(11);
  for (const Set& set : instruction_sets()) {
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      for (Reduce kind : {Reduce::sum, Reduce::product, Reduce::min, Reduce::max}) {
        for (int inputs : {1, 2, 3, 8}) {
          std::vector<std::vector<std::uint16_t>> data(inputs, std::vector<std::uint16_t>(kBig));
          std::vector<const std::byte*> pointers;
          for (auto& input : data) {
            for (auto& value : input) value = static_cast<std::uint16_t>(random());
            pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
          }
          std::vector<std::uint16_t> out(kBig);
          set.table->reduce[static_cast<int>(dtype)][static_cast<int>(kind)](
              reinterpret_cast<std::byte*>(out.data()), pointers.data(), pointers.size(), kBig, 0);
          for (std::size_t i = 0; i < kBig; ++i) {
            float wide = widened(dtype, data[0][i]);
            for (int k = 1; k < inputs; ++k)
              wide = combine<float>(kind, wide, widened(dtype, data[k][i]));
            if (std::isnan(wide)) {
              ASSERT_TRUE(std::isnan(widened(dtype, out[i])));
            } else {
              ASSERT_EQ(out[i], narrowed(dtype, wide))
                  << set.name << " " << name_of(kind) << " " << name_of(dtype) << " element " << i;
            }
          }
        }
      }
    }
  }
}

// 1 + 2^-11 + 2^-11 is 1 + 2^-10 with a float32 sum, and 1 if every addition rounds to a half.
TEST(Kernels, HalfSumsKeepWhatEveryStepWouldLose) {
  const std::uint16_t one = 0x3c00;
  const std::uint16_t tiny = 0x1000;
  const std::vector<const std::byte*> inputs{reinterpret_cast<const std::byte*>(&one),
                                             reinterpret_cast<const std::byte*>(&tiny),
                                             reinterpret_cast<const std::byte*>(&tiny)};
  std::uint16_t out = 0;
  reduce_many(reinterpret_cast<std::byte*>(&out), inputs, 1, DType::float16, Reduce::sum);
  EXPECT_EQ(out, 0x3c01);
}

// spec: F19 AVG: one division; 16-bit floats neither overflow nor round twice
TEST(Kernels, HalfAveragesDoNotOverflow) {
  const std::uint16_t large = 0x7bff;  // 65504
  const std::vector<const std::byte*> inputs(4, reinterpret_cast<const std::byte*>(&large));
  std::uint16_t out = 0;
  reduce_complete(reinterpret_cast<std::byte*>(&out), inputs, 1, DType::float16, Reduce::avg);
  EXPECT_EQ(out, large);
}

// spec: F15 bool: sum is or, product is and, exclusive or is parity, for any byte that is true
TEST(Kernels, BooleansFollowLogic) {
  for (int inputs : {1, 2, 3}) {
    for (int pattern = 0; pattern < 1 << inputs; ++pattern) {
      std::vector<std::uint8_t> values;
      std::vector<const std::byte*> pointers;
      for (int k = 0; k < inputs; ++k)
        values.push_back((pattern >> k & 1) != 0 ? static_cast<std::uint8_t>(2 + 97 * k) : 0);
      for (auto& value : values) pointers.push_back(reinterpret_cast<const std::byte*>(&value));
      const bool any = pattern != 0;
      const bool all = pattern == (1 << inputs) - 1;
      const auto check = [&](Reduce kind, bool expected) {
        std::uint8_t out = 77;
        reduce_complete(reinterpret_cast<std::byte*>(&out), pointers, 1, DType::boolean, kind);
        EXPECT_EQ(out, expected ? 1 : 0) << name_of(kind) << " of pattern " << pattern;
      };
      check(Reduce::sum, any);
      check(Reduce::max, any);
      check(Reduce::bor, any);
      check(Reduce::premul_sum, any);
      check(Reduce::product, all);
      check(Reduce::min, all);
      check(Reduce::band, all);
      check(Reduce::avg, all);
      check(Reduce::bxor, std::popcount(static_cast<unsigned>(pattern)) % 2 == 1);
    }
  }
}

// spec: F14 AVG divides by the group's size
// spec: F19 AVG: integers truncate towards zero
TEST(Kernels, AveragesDivideOnceAndTruncate) {
  const auto average = []<class T>(DType dtype, std::vector<T> values) {
    std::vector<const std::byte*> pointers;
    for (T& value : values) pointers.push_back(reinterpret_cast<const std::byte*>(&value));
    T at_once{};
    T in_two{};
    reduce_complete(reinterpret_cast<std::byte*>(&at_once), pointers, 1, dtype, Reduce::avg);
    reduce_many(reinterpret_cast<std::byte*>(&in_two), pointers, 1, dtype, Reduce::avg);
    finish_average(reinterpret_cast<std::byte*>(&in_two), 1, dtype,
                   static_cast<int>(values.size()));
    EXPECT_EQ(at_once, in_two);
    return at_once;
  };
  EXPECT_EQ(average(DType::int32, std::vector<std::int32_t>{-3, -4}), -3);
  EXPECT_EQ(average(DType::int64, std::vector<std::int64_t>{3, 4}), 3);
  EXPECT_EQ(average(DType::int8, std::vector<std::int8_t>{-1, -1, -1}), -1);
  EXPECT_EQ(average(DType::uint8, std::vector<std::uint8_t>{7, 8}), 7);
  EXPECT_EQ(average(DType::float64, std::vector<double>{1, 2, 6}), 3.0);
  EXPECT_EQ(average(DType::float32, std::vector<float>{1, 2}), 1.5f);
  EXPECT_EQ(average(DType::complex64, std::vector<std::complex<float>>{{1, 2}, {3, 6}}),
            std::complex<float>(2, 4));
  EXPECT_EQ(average(DType::complex128, std::vector<std::complex<double>>{{1, 2}, {3, 6}}),
            std::complex<double>(2, 4));
  // 300 members divide an int8 sum; int8 cannot hold 300.
  std::vector<std::int8_t> many(300, 0);
  many[0] = 100;
  EXPECT_EQ(average(DType::int8, many), 0);
}

// spec: F19 PREMUL_SUM multiplies each rank's input
TEST(Kernels, ScalesEveryType) {
  const auto scaled = []<class T>(DType dtype, T value, double factor) {
    T out{};
    scale(reinterpret_cast<std::byte*>(&out), reinterpret_cast<const std::byte*>(&value), 1, dtype,
          factor);
    return out;
  };
  EXPECT_EQ(scaled(DType::float32, 3.0f, 0.5), 1.5f);
  EXPECT_EQ(scaled(DType::float64, 3.0, 0.5), 1.5);
  EXPECT_EQ(scaled(DType::int32, std::int32_t{-7}, 0.5), -3);
  EXPECT_EQ(scaled(DType::int64, std::int64_t{-7}, 0.5), -3);
  EXPECT_EQ(scaled(DType::int64, std::int64_t{7}, 1e300), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(scaled(DType::int64, std::int64_t{7}, std::numeric_limits<double>::quiet_NaN()), 0);
  EXPECT_EQ(scaled(DType::int16, std::int16_t{100}, 2.0), 200);
  EXPECT_EQ(scaled(DType::uint8, std::uint8_t{100}, 2.0), 200);
  EXPECT_EQ(scaled(DType::boolean, std::uint8_t{5}, 0.25), 1);
  EXPECT_EQ(scaled(DType::boolean, std::uint8_t{5}, 0.0), 0);
  EXPECT_EQ(scaled(DType::complex64, std::complex<float>(2, 4), 0.5), std::complex<float>(1, 2));
  EXPECT_EQ(scaled(DType::complex128, std::complex<double>(2, 4), 0.5), std::complex<double>(1, 2));
  EXPECT_EQ(scaled(DType::float16, std::uint16_t{0x3c00}, 0.5), 0x3800);
  EXPECT_EQ(scaled(DType::bfloat16, std::uint16_t{0x3f80}, 0.5), 0x3f00);
}

// spec: F3 complex: sums add both parts
TEST(Kernels, ComplexSumsAddParts) {
  const std::vector<std::complex<double>> values{{1, 2}, {10, 20}, {100, 200}};
  std::vector<const std::byte*> pointers;
  for (auto& value : values) pointers.push_back(reinterpret_cast<const std::byte*>(&value));
  std::complex<double> out;
  reduce_many(reinterpret_cast<std::byte*>(&out), pointers, 1, DType::complex128, Reduce::sum);
  EXPECT_EQ(out, std::complex<double>(111, 222));
}

/// Random bits without NaNs: which of two NaNs results is up to the compiler.
std::vector<std::byte> random_values(DType dtype, std::size_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> values(bytes);
  for (std::byte& value : values) value = static_cast<std::byte>(random());
  const bool complex = dtype == DType::complex64 || dtype == DType::complex128;
  const bool floats = complex || dtype == DType::float16 || dtype == DType::bfloat16 ||
                      dtype == DType::float32 || dtype == DType::float64;
  const std::size_t width = size_of(dtype) / (complex ? 2 : 1);
  if (floats) {
    for (std::size_t i = width - 1; i < bytes; i += width)
      values[i] &= std::byte{0xbf};  // the highest exponent bit
  }
  return values;
}

/// The concatenated results of every function of a table on the same values.
std::vector<std::byte> results_of(const kernels::Table& table, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> all;
  const auto keep = [&all](const auto& values) {
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    all.insert(all.end(), bytes, bytes + values.size() * sizeof values[0]);
  };
  for (int number = 0; number < kReducibleDTypes; ++number) {
    const auto dtype = static_cast<DType>(number);
    const bool complex = dtype == DType::complex64 || dtype == DType::complex128;
    const std::size_t bytes =
        kBig * size_of(dtype) / (complex ? 2 : 1);  // complex types count parts
    const auto first = random_values(dtype, bytes, random),
               second = random_values(dtype, bytes, random),
               third = random_values(dtype, bytes, random);
    for (int kind = 0; kind < kReduces; ++kind) {
      if (table.reduce[number][kind] == nullptr) continue;
      const std::byte* const inputs[] = {first.data(), second.data(), third.data()};
      for (const int divisor : {0, 3}) {
        std::vector<std::byte> out(bytes);
        table.reduce[number][kind](out.data(), inputs, std::size(inputs), kBig, divisor);
        keep(out);
      }
    }
    for (const double factor : {1.0 / 3, -2.75}) {
      std::vector<std::byte> out(bytes);
      table.scale[number](out.data(), first.data(), kBig, factor);
      keep(out);
    }
    auto divided = first;
    table.divide[number](divided.data(), kBig, 7);
    keep(divided);
  }
  for (const bool half : {true, false}) {
    const auto narrow_values =
        random_values(half ? DType::float16 : DType::bfloat16, 2 * kBig, random);
    std::vector<float> wide(kBig);
    (half ? table.widen_half : table.widen_bfloat)(wide.data(), narrow_values.data(), kBig);
    keep(wide);
    const auto wide_values = random_values(DType::float32, 4 * kBig, random);
    std::vector<std::byte> back(2 * kBig);
    (half ? table.narrow_half : table.narrow_bfloat)(
        back.data(), reinterpret_cast<const float*>(wide_values.data()), kBig);
    keep(back);
  }
  return all;
}

TEST(Kernels, EveryInstructionSetComputesTheSameBits) {
  const auto sets = instruction_sets();
  const auto expected = results_of(*sets.front().table, 5);
  for (std::size_t i = 1; i < sets.size(); ++i) {
    const auto results = results_of(*sets[i].table, 5);
    ASSERT_EQ(results.size(), expected.size());
    const auto different = std::mismatch(results.begin(), results.end(), expected.begin()).first;
    EXPECT_TRUE(different == results.end())
        << sets[i].name << " differs at byte " << different - results.begin() << " of all results";
  }
}

// Same bits at every alignment.
TEST(Kernels, AlignmentChangesNothing) {
  std::vector<float> a(kBig), b(kBig), expected(kBig);
  std::mt19937 random(3);
  for (auto& value : a) value = static_cast<float>(random()) / 3.0f;
  for (auto& value : b) value = static_cast<float>(random()) / 7.0f;
  const std::size_t bytes = kBig * sizeof(float);
  const auto run = [&](std::size_t shift_a, std::size_t shift_b, std::size_t shift_out) {
    std::vector<std::byte> one(bytes + 64), two(bytes + 64), out(bytes + 64);
    std::memcpy(one.data() + shift_a, a.data(), bytes);
    std::memcpy(two.data() + shift_b, b.data(), bytes);
    const std::vector<const std::byte*> inputs{one.data() + shift_a, two.data() + shift_b};
    reduce_many(out.data() + shift_out, inputs, kBig, DType::float32, Reduce::sum);
    return std::vector<std::byte>(out.begin() + shift_out, out.begin() + shift_out + bytes);
  };
  EXPECT_EQ(run(0, 0, 0), run(4, 12, 20));
  EXPECT_EQ(run(0, 0, 0), run(1, 2, 3));
}

}  // namespace
}  // namespace muster::collective
