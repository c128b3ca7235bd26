/// What is saved and loaded: names, and what they stand for.
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

#include "muster/checkpoint/items.h"
#include "muster/group/distributed_sampler.h"
#include "muster/shards/files/index.h"

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

  /// Parameters and buffers as `name.<theirs>`. Those that FSDP has sharded are added as this
  /// rank's shards, also inside of a module that is no FSDP itself.
  State& add_module(const std::string& name, torch::nn::Module& module);

  /// As torch's state dicts have it: `name.state.<parameter>.exp_avg`, and the groups' options in
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

/// For `save` and `load`.
struct StateAccess {
  static std::vector<Item> items(const State& state, int rank);
  /// JSON.
  static std::string values(const State& state);
  /// What is to be filled from this checkpoint; makes an optimizer's state where there is none yet.
  static std::vector<Item> wanted(State& state, const shards::Index& index, int rank);
  /// After the tensors have been filled. Without values (safetensors files of others have none),
  /// what is no tensor stays as it is.
  static void finish(State& state, const shards::Index& index, bool with_values);
};

}  // namespace muster::checkpoint
