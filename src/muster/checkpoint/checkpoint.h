/// Sharded checkpoints: each rank writes its part, any number of ranks loads it, however the model
/// is wrapped there. Names after torch.distributed.checkpoint. docs/user/checkpoints.md has the
/// format.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "muster/checkpoint/engine.h"
#include "muster/checkpoint/state.h"
#include "muster/group/process_group.h"

namespace muster::checkpoint {

struct SaveOptions {
  /// The ranks that save together; null: those of the default group, or this process alone where
  /// there is none.
  Group process_group = nullptr;
  std::optional<std::int64_t> step = {};  ///< shown by `muster checkpoint ls`
  bool overwrite = true;                  ///< else a checkpoint at that path is an error
  /// Of the checkpoints in the folder around it, so many stay, this one included; 0: all.
  int keep_last = 0;
};

struct LoadOptions {
  Group process_group = nullptr;  ///< as for saving
  /// The folder has safetensors files that torch's HuggingFaceStorageWriter or others wrote, and no
  /// muster.json. Values are then not loaded.
  bool safetensors = false;
};

/// Writes a checkpoint into the folder `path`, which is made. Collective: every rank gives a state
/// of the same names. Returns when it is on the disk; a checkpoint that was at `path` is whole
/// until then. Throws DistError on all ranks where one cannot write.
void save(const State& state, const std::string& path, const SaveOptions& options = {});

using Saving = Saver::Saving;

/// The same, returning when this rank's part has been copied into memory: the program may change it
/// from then on. A thread writes; its calls travel in a group of their own. The next save of the
/// group waits for it. Call `wait()` before the group is destroyed. That memory stays for the next
/// save.
[[nodiscard]] Saving async_save(const State& state, const std::string& path,
                                const SaveOptions& options = {});

/// The newest checkpoint in a folder, by the time of its commit: what to load after a restart. None
/// where there is none.
std::optional<std::string> latest(const std::string& folder);

/// Fills the state from the checkpoint in the folder `path`, which every rank can read. Collective.
/// Throws DistError on all ranks, naming file and tensor: where one has no such tensor or value,
/// other sizes, damaged bytes, or another checkpoint at that path than rank 0 has; tensors that
/// were read before that have been filled.
void load(State& state, const std::string& path, const LoadOptions& options = {});

}  // namespace muster::checkpoint
