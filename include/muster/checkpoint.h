/// Sharded checkpoints: each rank writes its part, any number of ranks loads it, however the model
/// is wrapped there. Names after torch.distributed.checkpoint. docs/user/checkpoints.md has the
/// format.
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

/// A list of what belongs into a checkpoint, made alike on all ranks. It refers to what is added,
/// which must outlive it: `save` reads it, `load` fills it in place. The same names are found again
/// whatever the number of ranks and the wrapping; Python's `muster.checkpoint` has the same ones.
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

  /// The same on all ranks that add it: one of them writes it.
  State& add_tensor(const std::string& name, const at::Tensor& tensor);
  /// A box of a whole tensor of `sizes`, as tensor-parallel layers have it: other ranks add others.
  State& add_box(const std::string& name, const at::Tensor& tensor, std::vector<std::int64_t> sizes,
                 std::vector<std::int64_t> offsets);

  /// Parameters and buffers as `name.PARAMETER`. Those that FSDP has sharded are added as this
  /// rank's shards, also inside of a module that is no FSDP itself.
  State& add_module(const std::string& name, torch::nn::Module& module);

  /// As torch's state dicts have it: `name.state.PARAMETER.exp_avg`, and the groups' options in
  /// the value `name.param_groups`. `of` names the parameters. Adam, AdamW, SGD, Adagrad and
  /// RMSprop, and a ZeroRedundancyOptimizer of these, of which each rank adds its part. Throws
  /// DistError for another class, and for a parameter that `of` does not have.
  State& add_optimizer(const std::string& name, torch::optim::Optimizer& optimizer,
                       const torch::nn::Module& of);

  /// Rank 0's is saved.
  State& add_value(const std::string& name, bool& value);
  State& add_value(const std::string& name, std::int64_t& value);
  State& add_value(const std::string& name, double& value);
  State& add_value(const std::string& name, std::string& value);
  /// Its epoch, which `load` sets.
  State& add_sampler(const std::string& name, DistributedSampler& sampler);
  /// This rank's generator, absent: torch's own of the CPU. A rank of a higher number than were
  /// saved keeps its state.
  State& add_random(const std::string& name, const std::optional<at::Generator>& generator = {});

 private:
  friend struct StateAccess;
  struct Entries;
  std::unique_ptr<Entries> entries_;
};

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

/// The end of one save. Copies refer to the same save. Thread-safe.
class Saving {
 public:
  /// Blocks until the checkpoint is there; throws DistError on all ranks if the save has failed on
  /// one of them.
  void wait();
  /// Never blocks.
  bool done() const;

 private:
  friend class Saver;
  struct State;
  std::shared_ptr<State> state_;
};

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
