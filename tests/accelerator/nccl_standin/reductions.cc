// SPDX-License-Identifier: BSD-3-Clause
#include "reductions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace muster::standin {
namespace {

using nccl::NcclReduction;
using nccl::Type;

/// The type in which values of T are summed.
template <class T>
using Wide = std::conditional_t<std::is_class_v<T>, float, T>;

template <class T>
T combined(T a, T b, NcclReduction reduction) {
  if constexpr (std::is_floating_point_v<T>)
    if (reduction == NcclReduction::min || reduction == NcclReduction::max) {
      if (std::isnan(a)) return a;
      if (std::isnan(b)) return b;
    }
  switch (reduction) {
    case NcclReduction::product: return static_cast<T>(a * b);
    case NcclReduction::min: return b < a ? b : a;
    case NcclReduction::max: return a < b ? b : a;
    default: return static_cast<T>(a + b);
  }
}

template <class T>
void reduce_as(const std::vector<const std::byte*>& parts, const std::vector<double>* factors,
               std::byte* out, std::size_t count, NcclReduction reduction) {
  using W = Wide<T>;
  for (std::size_t i = 0; i < count; ++i) {
    W total{};
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      W next = static_cast<W>(reinterpret_cast<const T*>(parts[rank])[i]);
      if (factors != nullptr) next = static_cast<W>(next * static_cast<W>((*factors)[rank]));
      total = rank == 0 ? next : combined(total, next, reduction);
    }
    if (reduction == NcclReduction::avg)
      total = static_cast<W>(total / static_cast<W>(parts.size()));
    reinterpret_cast<T*>(out)[i] = static_cast<T>(total);
  }
}

/// Calls `body` with a zero of the type.
template <class Body>
auto with_type(Type type, const Body& body) {
  switch (type) {
    case Type::int8: return body(std::int8_t{});
    case Type::uint8: return body(std::uint8_t{});
    case Type::int32: return body(std::int32_t{});
    case Type::uint32: return body(std::uint32_t{});
    case Type::int64: return body(std::int64_t{});
    case Type::uint64: return body(std::uint64_t{});
    case Type::float16: return body(c10::Half{});
    case Type::bfloat16: return body(c10::BFloat16{});
    case Type::float8_e4m3: return body(c10::Float8_e4m3fn{});
    case Type::float8_e5m2: return body(c10::Float8_e5m2{});
    case Type::float32: return body(float{});
    default: return body(double{});
  }
}

}  // namespace

std::size_t bytes_of(Type type) {
  return with_type(type, [](auto zero) { return sizeof zero; });
}

double number_at(const void* data, Type type) {
  return with_type(type,
                   [&]<class T>(T) { return static_cast<double>(*static_cast<const T*>(data)); });
}

void reduce(const std::vector<const std::byte*>& parts, const std::vector<double>* factors,
            std::byte* out, std::size_t count, Type type, NcclReduction reduction) {
  with_type(type, [&]<class T>(T) { reduce_as<T>(parts, factors, out, count, reduction); });
}

}  // namespace muster::standin
