/// Which saver this process is, as other savers of one path see it.
#pragma once

#include <string>

#include "muster/shards/staging.h"

namespace muster::checkpoint {

/// For a checkpoint at `path`: the job's name (TORCHELASTIC_RUN_ID), its epoch, and what this
/// process has loaded from the folder around.
shards::SaverIdentity saver_identity(const std::string& path);

/// Remembers, when a checkpoint is loaded, the last commit in the folder around it: a job that is
/// started anew counts its epochs from 1 again, and goes on from what the epochs before it saved.
void note_loaded(const std::string& path);

}  // namespace muster::checkpoint
