/// The header of a safetensors file: 8 bytes of length, little-endian, and as much JSON; the bytes
/// of the tensors follow in the header's order. `DCP_SHARDING_INFO` in its metadata says where in
/// the whole tensor each piece begins, as torch's HuggingFaceStorageWriter has it.
/// Source: https://huggingface.co/docs/safetensors, torch/distributed/checkpoint/hf_storage.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/plan/box.h"
#include "muster/status.h"

namespace muster::shards {

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
