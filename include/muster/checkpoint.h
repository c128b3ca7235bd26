// SPDX-License-Identifier: BSD-3-Clause
/// Sharded checkpoints. Each rank writes its part. Any number of ranks can load the whole, under
/// any wrapping of the model. Names after torch.distributed.checkpoint. docs/user/checkpoints.md
/// has the format.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/distributed_sampler.h"
#include "muster/process_group.h"

namespace muster::checkpoint {

/// The contents of a checkpoint. All ranks add the same names. A State refers to the added objects,
/// which must outlive it: `save` reads them, `load` fills them in place. Names do not depend on the
/// number of ranks or on the wrapping; Python's `muster.checkpoint` uses the same ones.
///
///   checkpoint::State state;
///   state.add_module("model", *net);              // plain, or inside DDP or FSDP
///   state.add_optimizer("optimizer", optimizer, *net);
///   state.add_value("step", step);
///   checkpoint::save(state, "run/step-100");
class State {
 public:
  State();
  ~State();
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;

  /// The value must be equal on all ranks that add it; one of them writes it.
  State& add_tensor(const std::string& name, const at::Tensor& tensor);
  /// This rank's box of a larger tensor of `sizes`; other ranks add the other boxes.
  State& add_box(const std::string& name, const at::Tensor& tensor, std::vector<std::int64_t> sizes,
                 std::vector<std::int64_t> offsets);

  /// Adds parameters and buffers as `name.PARAMETER`. Parameters that FSDP has sharded are added as
  /// this rank's shards, even if `module` itself is not wrapped; those of tensor-parallel layers as
  /// this rank's boxes.
  State& add_module(const std::string& name, torch::nn::Module& module);

  /// Adds the state as in torch's state dicts: tensors such as `name.state.PARAMETER.exp_avg`, and
  /// the groups' options as the value `name.param_groups`. `of` is the module that names the
  /// parameters. Supports Adam, AdamW, SGD, Adagrad and RMSprop, and a ZeroRedundancyOptimizer of
  /// these, whose parts each rank adds. Throws DistError for any other class, and for a parameter
  /// that is not in `of`. `load` refuses what another class, other groups or other parameters
  /// saved.
  State& add_optimizer(const std::string& name, torch::optim::Optimizer& optimizer,
                       const torch::nn::Module& of);

  /// Rank 0's value is saved.
  State& add_value(const std::string& name, bool& value);
  State& add_value(const std::string& name, std::int64_t& value);
  State& add_value(const std::string& name, double& value);
  State& add_value(const std::string& name, std::string& value);
  /// Saves and restores the sampler's epoch.
  State& add_sampler(const std::string& name, DistributedSampler& sampler);
  /// This rank's generator; default: torch's CPU generator. `load` leaves the generator unchanged
  /// on ranks for which no state was saved.
  State& add_random(const std::string& name, const std::optional<at::Generator>& generator = {});

 private:
  friend struct StateAccess;
  struct Entries;
  std::unique_ptr<Entries> entries_;
};

struct SaveOptions {
  /// The ranks that save together; null: the default group, or this process alone if there is no
  /// default group.
  Group process_group = nullptr;
  std::optional<std::int64_t> step = {};  ///< shown by `muster checkpoint ls`
  bool overwrite = true;                  ///< false: an existing checkpoint at the path is an error
  /// Number of newest checkpoints to keep in the parent folder, by `latest`'s order, and this one;
  /// 0: all. Files that others put there stay.
  int keep_last = 0;
};

struct LoadOptions {
  Group process_group = nullptr;  ///< as for saving
  /// The folder has safetensors files that torch's HuggingFaceStorageWriter or others wrote, and no
  /// muster.json. Values are then not loaded.
  bool safetensors = false;
};

/// Writes a checkpoint into the folder `path` and creates the folder. Collective: every rank passes
/// a state with the same names. Returns when the checkpoint is on disk; an older checkpoint at
/// `path` stays intact until then. If one rank cannot write, throws DistError on all ranks, and so
/// if a later save to `path` has begun, in whatever process, or if the checkpoint there is of a
/// later epoch of this job.
void save(const State& state, const std::string& path, const SaveOptions& options = {});

/// A handle to an asynchronous save. Copies refer to the same save. Thread-safe.
class Saving {
 public:
  /// Blocks until the checkpoint is on disk. If the save failed on one rank, throws DistError on
  /// all ranks.
  void wait();
  /// Never blocks.
  bool done() const;

 private:
  friend class Saver;
  struct State;
  std::shared_ptr<State> state_;
};

/// As `save`, but returns when this rank's part has been copied into memory; the program may then
/// change the originals. A thread writes the copy and communicates on a group of its own. The next
/// save of the group waits for it. Call `wait()` before the group is destroyed. The copy's memory
/// is kept for the next save.
[[nodiscard]] Saving async_save(const State& state, const std::string& path,
                                const SaveOptions& options = {});

/// The newest checkpoint in `folder`, by its step and then by the order of the commits: the one to
/// load after a restart. Empty if there is none.
std::optional<std::string> latest(const std::string& folder);

/// Fills the state from the checkpoint in the folder `path`, which every rank must be able to read.
/// Collective. Throws DistError on all ranks, naming file and tensor, if any rank finds a missing
/// tensor or value, different sizes or types, another optimizer, damaged files, or a different
/// checkpoint at the path than rank 0: before anything is filled. Every byte that is read is
/// verified; tensors that were read before altered bytes are found have been filled.
void load(State& state, const std::string& path, const LoadOptions& options = {});

}  // namespace muster::checkpoint
