/// The element types of safetensors, by their names there, and types that it has no name for.
#pragma once

#include <cstdint>
#include <string_view>

namespace muster::shards {

struct ElementRow {
  std::string_view name;
  std::int64_t bytes;
  /// What the files say: "U8" with a last dimension of the bytes of an element, or a type of the
  /// same size. Empty: the name itself.
  std::string_view in_files = {};
};

/// The row of a name; with an empty name where it is none.
constexpr ElementRow element_row(std::string_view dtype) {
  constexpr ElementRow kTable[] = {
      {"BOOL", 1},
      {"U8", 1},
      {"I8", 1},
      {"F8_E5M2", 1},
      {"F8_E4M3", 1},
      {"F8_E8M0", 1},
      {"I16", 2},
      {"U16", 2},
      {"F16", 2},
      {"BF16", 2},
      {"I32", 4},
      {"U32", 4},
      {"F32", 4},
      {"C64", 8},
      {"F64", 8},
      {"I64", 8},
      {"U64", 8},
      {"C32", 4, "U8"},
      {"C128", 16, "U8"},
      {"F8_E4M3FNUZ", 1, "U8"},
      {"F8_E5M2FNUZ", 1, "U8"},
      {"F4_E2M1X2", 1, "U8"},
      {"INT", 8, "I64"},  // a number of Python's, no tensor
  };
  for (const ElementRow& row : kTable)
    if (row.name == dtype) return row;
  return {};
}

/// Bytes of one element; 0 for a name that is none.
constexpr std::int64_t element_bytes(std::string_view dtype) { return element_row(dtype).bytes; }

}  // namespace muster::shards
