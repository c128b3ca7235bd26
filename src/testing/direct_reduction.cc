// SPDX-License-Identifier: BSD-3-Clause
#include "testing/direct_reduction.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

#include "core/collective/kernels/kernels.h"

namespace muster::testing {
namespace {

using collective::Reduce;

template <class T>
T element(ConstBytes bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void put(MutableBytes bytes, std::size_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

template <class T>
T multiplied(T value, double factor) {
  if constexpr (std::is_floating_point_v<T>) return value * static_cast<T>(factor);
  const double wide = static_cast<double>(value) * factor;
  if (wide >= 9.2233720368547758e18)
    return static_cast<T>(std::numeric_limits<std::int64_t>::max());
  if (wide <= -9.2233720368547758e18)
    return static_cast<T>(std::numeric_limits<std::int64_t>::min());
  return static_cast<T>(static_cast<std::int64_t>(wide));
}

template <class T>
T divided(T value, double by) {
  if constexpr (std::is_floating_point_v<T>) return value / static_cast<T>(by);
  return static_cast<T>(static_cast<std::int64_t>(value) / static_cast<std::int64_t>(by));
}

template <class T>
void reduce_plain(MutableBytes out, std::span<const ConstBytes> inputs,
                  std::span<const double> factors, Reduce kind, double divisor) {
  for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
    T sum{};
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      T value = element<T>(inputs[r], i);
      if (kind == Reduce::premul_sum) value = multiplied(value, factors[r]);
      sum = r == 0 ? value : combine(kind, sum, value);
    }
    put(out, i, kind == Reduce::avg ? divided(sum, divisor) : sum);
  }
}

void reduce_short(MutableBytes out, std::span<const ConstBytes> inputs,
                  std::span<const double> factors, DType dtype, Reduce kind, double divisor) {
  const auto wide = [&](std::uint16_t bits) {
    float value;
    collective::widen(&value, reinterpret_cast<const std::byte*>(&bits), 1, dtype);
    return value;
  };
  const auto narrow = [&](float value) {
    std::uint16_t bits;
    collective::narrow(reinterpret_cast<std::byte*>(&bits), &value, 1, dtype);
    return bits;
  };
  for (std::size_t i = 0; i < out.size() / 2; ++i) {
    float sum = 0;
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      float value = wide(element<std::uint16_t>(inputs[r], i));
      if (kind == Reduce::premul_sum) value = wide(narrow(multiplied(value, factors[r])));
      sum = r == 0 ? value : combine(kind, sum, value);
    }
    put(out, i, narrow(kind == Reduce::avg ? divided(sum, divisor) : sum));
  }
}

void reduce_booleans(MutableBytes out, std::span<const ConstBytes> inputs,
                     std::span<const double> factors, Reduce kind) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::size_t trues = 0;
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      trues +=
          inputs[r][i] != std::byte{0} && (kind != Reduce::premul_sum || factors[r] != 0.0) ? 1 : 0;
    }
    bool result = trues > 0;
    if (kind == Reduce::product || kind == Reduce::min || kind == Reduce::band ||
        kind == Reduce::avg)
      result = trues == inputs.size();
    if (kind == Reduce::bxor) result = trues % 2 == 1;
    out[i] = std::byte{result};
  }
}

template <class T>
void fill_floats(MutableBytes out, std::mt19937_64& random) {
  for (std::size_t i = 0; i < out.size() / sizeof(T); ++i) {
    const std::uint64_t bits = random();
    const T mantissa =
        static_cast<T>(static_cast<std::int64_t>(bits >> 12)) / static_cast<T>(1LL << 51) - T(1);
    put(out, i,
        bits % 199 == 0 ? std::numeric_limits<T>::quiet_NaN()
                        : std::ldexp(mantissa, static_cast<int>(bits % 7) - 3));
  }
}

/// `tolerance`: of numbers up to 1, and relative to larger ones.
template <class T>
std::ptrdiff_t difference(ConstBytes a, ConstBytes b, T tolerance) {
  for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
    const T x = element<T>(a, i);
    const T y = element<T>(b, i);
    if (std::memcmp(&x, &y, sizeof(T)) == 0 || (std::isnan(x) && std::isnan(y))) continue;
    if (std::abs(x - y) <= tolerance * std::max(T(1), std::abs(y))) continue;
    return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

/// Tolerance of a type's sums, in any order, of a few numbers that are smaller than 10.
template <class T>
T order_tolerance(DType dtype) {
  if (dtype == DType::float16) return T(0.002);
  if (dtype == DType::bfloat16) return T(0.02);
  return 100 * std::numeric_limits<T>::epsilon();
}

std::ptrdiff_t difference_of(ConstBytes a, ConstBytes b, DType dtype, bool any_order);

}  // namespace

void reduce_directly(MutableBytes out, std::span<const ConstBytes> inputs,
                     std::span<const double> factors, DType dtype, Reduce reduce, double divisor) {
  if (divisor == 0) divisor = static_cast<double>(inputs.size());
  switch (dtype) {
    case DType::boolean: return reduce_booleans(out, inputs, factors, reduce);
    case DType::uint8: return reduce_plain<std::uint8_t>(out, inputs, factors, reduce, divisor);
    case DType::int8: return reduce_plain<std::int8_t>(out, inputs, factors, reduce, divisor);
    case DType::int16: return reduce_plain<std::int16_t>(out, inputs, factors, reduce, divisor);
    case DType::int32: return reduce_plain<std::int32_t>(out, inputs, factors, reduce, divisor);
    case DType::int64: return reduce_plain<std::int64_t>(out, inputs, factors, reduce, divisor);
    case DType::float16:
    case DType::bfloat16: return reduce_short(out, inputs, factors, dtype, reduce, divisor);
    case DType::float32:
    case DType::complex64: return reduce_plain<float>(out, inputs, factors, reduce, divisor);
    case DType::float64:
    case DType::complex128: return reduce_plain<double>(out, inputs, factors, reduce, divisor);
    default: return;
  }
}

void reduce_by_hosts(MutableBytes out, std::span<const ConstBytes> inputs,
                     std::span<const double> factors, DType dtype, Reduce reduce,
                     std::span<const int> first_ranks) {
  struct Ranks {
    std::size_t first, count;
  };
  const bool divides_once =
      reduce == Reduce::avg && dtype != DType::float16 && dtype != DType::bfloat16;
  Reduce within = reduce;
  if (divides_once) within = dtype == DType::boolean ? Reduce::band : Reduce::sum;
  const Reduce between = within == Reduce::premul_sum ? Reduce::sum : within;
  const auto ranks_of = [&](std::size_t host) {
    const auto first = static_cast<std::size_t>(first_ranks[host]);
    const auto after = host + 1 < first_ranks.size()
                           ? static_cast<std::size_t>(first_ranks[host + 1])
                           : inputs.size();
    return Ranks{first, after - first};
  };
  std::vector<std::vector<std::byte>> sums;
  std::size_t most = 0;
  for (std::size_t host = 0; host < first_ranks.size(); ++host)
    most = std::max(most, ranks_of(host).count);
  for (std::size_t host = 0; host < first_ranks.size(); ++host) {
    const auto [first, count] = ranks_of(host);
    sums.emplace_back(out.size());
    reduce_directly(sums.back(), inputs.subspan(first, count), factors.subspan(first, count), dtype,
                    within, static_cast<double>(most));
  }
  const std::vector<ConstBytes> parts(sums.begin(), sums.end());
  reduce_directly(out, parts, std::vector<double>(parts.size(), 1), dtype, between,
                  static_cast<double>(inputs.size()) / static_cast<double>(most));
  if (divides_once)
    collective::finish_average(out.data(), out.size() / size_of(dtype), dtype,
                               static_cast<int>(inputs.size()));
}

void fill_elements(MutableBytes out, DType dtype, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  switch (dtype) {
    case DType::float32:
    case DType::complex64: return fill_floats<float>(out, random);
    case DType::float64:
    case DType::complex128: return fill_floats<double>(out, random);
    case DType::float16:
    case DType::bfloat16: {
      std::vector<float> wide(out.size() / 2);
      fill_floats<float>(std::as_writable_bytes(std::span(wide)), random);
      return collective::narrow(out.data(), wide.data(), wide.size(), dtype);
    }
    default: break;
  }
  std::size_t i = 0;
  for (; i + 8 <= out.size(); i += 8) {
    const std::uint64_t bits = random();
    std::memcpy(out.data() + i, &bits, 8);
  }
  for (std::uint64_t bits = random(); i < out.size(); ++i, bits >>= 8)
    out[i] = static_cast<std::byte>(bits);
  if (dtype == DType::boolean) {
    for (std::byte& value : out)
      value = (value & std::byte{3}) == std::byte{0} ? value : std::byte{0};
  }
}

std::ptrdiff_t first_difference(ConstBytes a, ConstBytes b, DType dtype) {
  return difference_of(a, b, dtype, false);
}

std::ptrdiff_t first_difference_in_any_order(ConstBytes a, ConstBytes b, DType dtype) {
  return difference_of(a, b, dtype, true);
}

namespace {

std::ptrdiff_t difference_of(ConstBytes a, ConstBytes b, DType dtype, bool any_order) {
  if (a.size() != b.size()) return 0;
  if (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0) return -1;
  const float tolerance = any_order ? order_tolerance<float>(dtype) : 0.0F;
  switch (dtype) {
    case DType::float32:
    case DType::complex64: return difference<float>(a, b, tolerance);
    case DType::float64:
    case DType::complex128:
      return difference<double>(a, b, any_order ? order_tolerance<double>(dtype) : 0.0);
    case DType::float16:
    case DType::bfloat16: {
      std::vector<float> x(a.size() / 2), y(b.size() / 2);
      collective::widen(x.data(), a.data(), x.size(), dtype);
      collective::widen(y.data(), b.data(), y.size(), dtype);
      return difference<float>(std::as_bytes(std::span(x)), std::as_bytes(std::span(y)), tolerance);
    }
    default: break;
  }
  std::size_t i = 0;
  while (a[i] == b[i]) ++i;
  return static_cast<std::ptrdiff_t>(i / size_of(dtype));
}

}  // namespace
}  // namespace muster::testing
