// SPDX-License-Identifier: BSD-3-Clause
/// The contents of a State, for `save` and `load`.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "checkpoint/modules/items.h"
#include "muster/checkpoint.h"

namespace muster::checkpoint {

struct StateAccess {
  static std::vector<CheckpointItem> items(const State& state, int rank);
  /// JSON.
  static std::string values(const State& state);
  /// The items to fill from this checkpoint. Compares the state with it and throws DistError if it
  /// does not fit; nothing of the state changes before `finish`. Without values (safetensors files
  /// of other programs have none), entries that are no tensors stay as they are.
  static std::vector<CheckpointItem> wanted(State& state, const shards::Index& index, int rank,
                                            bool with_values = true);
  /// After the tensors of the last `wanted` have been filled.
  static void finish(State& state);
};

}  // namespace muster::checkpoint
