// SPDX-License-Identifier: BSD-3-Clause
/// Element types, free of torch. `group/` maps torch's scalar types to these.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace muster {

/// The twelve that can be reduced come first; `raw8` to `raw64` stand for every other type of that
/// width (float8, uint16, ...) and can only be moved.
enum class DType : std::uint8_t {
  boolean,
  uint8,
  int8,
  int16,
  int32,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  raw8,
  raw16,
  raw32,
  raw64,
};
inline constexpr int kReducibleDTypes = 12;
inline constexpr int kDTypes = 16;

/// Bytes of one element: a power of two.
std::size_t size_of(DType dtype);
/// Whole elements in `bytes`, without the dozens of cycles that a division takes.
inline std::size_t elements_in(std::size_t bytes, DType dtype) {
  return bytes >> std::countr_zero(size_of(dtype));
}
/// torch's name: "bool", "float32", ...
std::string_view name_of(DType dtype);
bool is_reducible(DType dtype);
bool is_complex(DType dtype);
/// bool and the integers: those that have bit operations.
bool is_integral(DType dtype);

}  // namespace muster
