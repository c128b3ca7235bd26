// SPDX-License-Identifier: BSD-3-Clause
/// Which saver this process is, as other savers of one path see it.
#pragma once

#include "checkpoint/format/staging.h"

namespace muster::checkpoint {

/// The job's name (TORCHELASTIC_RUN_ID), its launch (MUSTER_LAUNCH) and its epoch.
shards::SaverIdentity saver_identity();

/// To be called when a checkpoint is loaded: from now on this launch comes after that which saved
/// it. A process whose launcher has told no launch goes on from there as a launch of its own: it is
/// no older epoch of what has saved that.
void note_loaded(const shards::CommitRecord& commit);

}  // namespace muster::checkpoint
