// SPDX-License-Identifier: BSD-3-Clause
/// The checkpoints of a folder: their order, the last of them, and what may be removed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "muster/status.h"

namespace muster::shards {

/// The folders in `folder` that are checkpoints, oldest first: by step, and among those of one step
/// by the number of their commit. One without a step stands behind all that were committed before
/// it. One whose record is damaged stands last, so that a program that loads the last hears of it.
std::vector<std::string> checkpoints_in(const std::string& folder);
/// The highest number of a commit or of a save that has begun in `folder`; 0: none.
std::int64_t highest_number_in(const std::string& folder);
/// Those in `folder` that a save began and never committed.
std::vector<std::string> unfinished_in(const std::string& folder);

/// Refuses a checkpoint whose folder has more than its index names.
Status check_only_own_files(const std::string& path, const Index& index);
/// Removes the index, then the files that it names, then the folder where it is empty: files and
/// folders that others put there stay. Refuses a symbolic link and an index that is damaged.
Status remove_checkpoint(const std::string& path);

/// Keeps `count` of the checkpoints around the one at `path`, and that one. Copies of checkpoints,
/// links, and checkpoints whose index is damaged are neither counted nor removed. Also removes what
/// killed saves left that began before the last commits.
Status keep_last(const std::string& path, int count);

}  // namespace muster::shards
