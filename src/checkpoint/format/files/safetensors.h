// SPDX-License-Identifier: BSD-3-Clause
/// The element types of safetensors, by their names there, and types that it has no name for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/plan/box.h"
#include "muster/status.h"

namespace muster::shards {
struct ElementRow {
  std::string_view name;
  std::int64_t bytes;
  /// The type's name in files: "U8" with a last dimension of the bytes of an element, or a type of
  /// the same size. Empty: the name itself.
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

// The header of a safetensors file: 8 bytes of length, little-endian, and as much JSON; the bytes
// of the tensors follow in the header's order. `DCP_SHARDING_INFO` in its metadata says where in
// the whole tensor each piece begins, as torch's HuggingFaceStorageWriter has it.
// Source: https://huggingface.co/docs/safetensors, torch/distributed/checkpoint/hf_storage.py.

/// Longest header that is read or written, as in the format's own library.
inline constexpr std::uint64_t kHeaderLimit = 100'000'000;
inline constexpr std::uint64_t kLengthBytes = 8;

/// The length of the JSON, out of the first bytes of a file.
std::uint64_t length_in(std::string_view file);

struct HeaderEntry {
  std::string name, dtype;
  Box box;                           ///< offsets: in the whole tensor
  std::uint64_t begin = 0, end = 0;  ///< bytes, counted from the end of the header
};

/// Gives an entry of a type that safetensors does not name the one that files have for it, with a
/// last dimension where that needs one.
void give_type_of_files(HeaderEntry& entry);

/// Entries one behind the other, from 0; their `begin` and `end` are set. Length and JSON, padded
/// so that the data is aligned to 8 bytes. `sharded`: with DCP_SHARDING_INFO.
std::string write_header(std::vector<HeaderEntry>& entries, bool sharded = true);

/// The JSON of the header of a file with so many bytes of data, in the order of the data. Refuses,
/// naming the tensor: types and sizes that are none, sizes that do not fit the bytes, and bytes
/// outside of the file, out of order, overlapping or belonging to no tensor.
Result<std::vector<HeaderEntry>> read_header(std::string_view json, std::uint64_t data_bytes);

}  // namespace muster::shards
