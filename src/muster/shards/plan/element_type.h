/// The element types of safetensors, by their names there.
#pragma once

#include <cstdint>
#include <string_view>

namespace muster::shards {

/// Bytes of one element; 0 for a name that is none.
constexpr std::int64_t element_bytes(std::string_view dtype) {
  struct ElementRow {
    std::string_view name;
    std::int64_t bytes;
  };
  constexpr ElementRow kTable[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"C64", 8}, {"F64", 8}, {"I64", 8},     {"U64", 8},
  };
  for (const ElementRow& row : kTable)
    if (row.name == dtype) return row.bytes;
  return 0;
}

}  // namespace muster::shards
