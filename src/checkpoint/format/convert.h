// SPDX-License-Identifier: BSD-3-Clause
/// From one form of a checkpoint to another, by one process.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/format/files/index.h"
#include "muster/status.h"

namespace muster::shards {

struct ExportOptions {
  std::string prefix;  ///< tensors whose names begin so are exported, without it: "model."
  std::int64_t file_bytes = 5'000'000'000;  ///< a file holds so many, or one tensor
};

/// Whole tensors in a new folder: model-00001-of-00002.safetensors and so on, and
/// model.safetensors.index.json, which transformers loads; a single one is model.safetensors. At
/// most 64 MiB are in memory.
Status export_whole(const Index& index, const std::string& folder,
                    const ExportOptions& options = {});

/// Whether the file system of a folder, which need not be there, has room for so many bytes: sizes
/// that a file claims may exceed what it holds.
Status check_room(const std::string& folder, std::uint64_t bytes);

/// A folder that torch or others wrote (`open_safetensors`) as a checkpoint of muster's. Nothing of
/// it stays in memory.
Status import_safetensors(const Index& index, const std::string& folder);

}  // namespace muster::shards
