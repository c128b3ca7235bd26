// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/dtype.h"

#include <algorithm>
#include <array>

namespace muster {
namespace {

struct DTypeRow {
  std::string_view name;
  std::uint8_t bytes;
  bool complex;
  bool integral;
};

constexpr std::array<DTypeRow, kDTypes> kTable{{
    {"bool", 1, false, true},
    {"uint8", 1, false, true},
    {"int8", 1, false, true},
    {"int16", 2, false, true},
    {"int32", 4, false, true},
    {"int64", 8, false, true},
    {"float16", 2, false, false},
    {"bfloat16", 2, false, false},
    {"float32", 4, false, false},
    {"float64", 8, false, false},
    {"complex64", 8, true, false},
    {"complex128", 16, true, false},
    {"raw8", 1, false, false},
    {"raw16", 2, false, false},
    {"raw32", 4, false, false},
    {"raw64", 8, false, false},
}};

static_assert(std::all_of(kTable.begin(), kTable.end(), [](const DTypeRow& each) {
  return std::has_single_bit(unsigned{each.bytes});
}));

const DTypeRow& row(DType dtype) { return kTable[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::size_t size_of(DType dtype) { return row(dtype).bytes; }
std::string_view name_of(DType dtype) { return row(dtype).name; }
bool is_reducible(DType dtype) { return static_cast<int>(dtype) < kReducibleDTypes; }
bool is_complex(DType dtype) { return row(dtype).complex; }
bool is_integral(DType dtype) { return row(dtype).integral; }

}  // namespace muster
