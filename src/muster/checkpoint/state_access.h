/// The contents of a State, for `save` and `load`.
#pragma once

#include <string>
#include <vector>

#include "muster/checkpoint.h"
#include "muster/checkpoint/items.h"
#include "muster/shards/files/index.h"

namespace muster::checkpoint {

struct StateAccess {
  static std::vector<CheckpointItem> items(const State& state, int rank);
  /// JSON.
  static std::string values(const State& state);
  /// What is to be filled from this checkpoint; makes an optimizer's state where there is none yet.
  static std::vector<CheckpointItem> wanted(State& state, const shards::Index& index, int rank);
  /// After the tensors have been filled. Without values (safetensors files of others have none),
  /// what is no tensor stays as it is.
  static void finish(State& state, const shards::Index& index, bool with_values);
};

}  // namespace muster::checkpoint
