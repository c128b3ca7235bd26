// SPDX-License-Identifier: BSD-3-Clause
/// Jobs that outlive their workers: when a rank dies, the other ranks keep their processes and
/// their memory, a replacement gets their state, and training goes on after the last commit. Needs
/// `muster run --elastic keep`; under other launchers `run` trains once and repairs nothing.
///
///   elastic::State state;
///   state.add_module("net", *net).add_optimizer("adam", adam, *net).add_value("step", step);
///   elastic::run(state, [&] {
///     DistributedDataParallel ddp(net);   // made anew in every epoch of the job
///     while (step < steps) {
///       train_one(ddp, adam, batch_of(step, get_rank(), get_world_size()));
///       ++step;
///       state.commit();
///     }
///   });
///
/// A `ShardedState` adds what each rank has its own part of, such as the shards of FSDP.
///
/// docs/user/elastic-keep.md says what a program has to observe.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/distributed_sampler.h"
#include "muster/errors.h"
#include "muster/init.h"

namespace muster::elastic {

/// The state that all ranks have alike between two steps, and its last commits, which are kept in
/// memory. It refers to the objects that are added, which must outlive it. Used by the thread that
/// calls `run`.
class State {
 public:
  State();
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  State& add_tensor(const std::string& name, const at::Tensor& tensor);
  /// Parameters and buffers. Throws DistError at the first commit if they are sharded (FSDP): that
  /// is for a ShardedState.
  State& add_module(const std::string& name, torch::nn::Module& module);
  /// As checkpoint::State has it; `of` names the parameters. A ZeroRedundancyOptimizer is for a
  /// ShardedState.
  State& add_optimizer(const std::string& name, torch::optim::Optimizer& optimizer,
                       const torch::nn::Module& of);
  State& add_value(const std::string& name, bool& value);
  State& add_value(const std::string& name, std::int64_t& value);
  State& add_value(const std::string& name, double& value);
  State& add_value(const std::string& name, std::string& value);
  /// Its epoch.
  State& add_sampler(const std::string& name, DistributedSampler& sampler);
  /// Seeds a generator, absent: torch's own of the CPU, at every commit anew from `seed`, the
  /// number of the commit and this rank: a step that is done again draws the same numbers, in a
  /// replacement too.
  State& add_random(std::int64_t seed, const std::optional<at::Generator>& generator = {});

  /// The end of a step, called by every rank after each, or after each tenth. Waits until all
  /// ranks have come; copies everything added to the older of two places in memory. A commit that
  /// has returned on any rank that lives is never lost. Throws DistError as a collective does, and
  /// Preempted; `run` handles both.
  void commit();
  /// Number of commits of the job so far, the state at the beginning included; equal on all ranks.
  /// 0: none yet.
  std::int64_t commits() const;
  /// Puts everything back to the last commit, and drops the gradients of the modules.
  void restore();

 private:
  friend struct StateSync;
  friend class ShardedState;
  struct StateParts;
  std::unique_ptr<StateParts> parts_;
};

/// The state of which each rank has its own part: modules that FullyShardedDataParallel has
/// sharded, their optimizers, ZeroRedundancyOptimizers. These hold a group, so `train` makes them
/// anew in each epoch, and this object too, which adds them to the commits of a State while it
/// lives. One at a time.
///
///   elastic::run(state, [&] {
///     Net net;                                    // equal on all ranks, or from a checkpoint
///     FullyShardedDataParallel<Net> model(net);
///     torch::optim::Adam adam(net->parameters());
///     elastic::ShardedState shards(state);
///     shards.add_module("net", *net).add_optimizer("adam", adam, *net).restore();
///     while (step < steps) ...                    // as without shards
///   });
///
/// Commits are then written to memory that the launcher holds too: they outlive any of the node's
/// processes but the launcher. With several nodes each commit is also sent to a rank of the next
/// node, and outlives the loss of its own. Any number of ranks can restore it.
class ShardedState {
 public:
  /// `state` must outlive it, as must what is added.
  explicit ShardedState(State& state);
  ~ShardedState();
  ShardedState(const ShardedState&) = delete;
  ShardedState& operator=(const ShardedState&) = delete;

  /// Parameters and buffers, of which this rank may have shards.
  ShardedState& add_module(const std::string& name, torch::nn::Module& module);
  ShardedState& add_optimizer(const std::string& name, torch::optim::Optimizer& optimizer,
                              const torch::nn::Module& of);
  /// Collective, once all is added: puts everything, what `state` has included, back to the last
  /// commit, and drops gradients. If the job has made none with shards, makes the first one, of
  /// what the ranks have. Throws DistError on all ranks if parts of the last commit are lost, with
  /// two neighbouring nodes at once.
  void restore();

 private:
  struct ShardedParts;
  std::unique_ptr<ShardedParts> parts_;
};

/// Thrown by `commit` to leave `run`: this process's node is to be given up.
class Preempted : public DistError {
 public:
  using DistError::DistError;
};

enum class RunOutcome : std::uint8_t {
  finished,   ///< the function has returned on all ranks
  preempted,  ///< this process is to end now; the state is that of the last commit
};

struct ElasticOptions {
  InitProcessGroupOptions group = {};  ///< of the default group in every epoch
  /// How long a group that has failed waits for the launcher's next epoch before its error is
  /// thrown.
  Duration repair_timeout = std::chrono::minutes(10);
};

/// Calls `train` until it has returned on all ranks. Around each call is a default group of its
/// own: `run` makes it, or takes the one that is there the first time, and ends it; groups and
/// wrappers such as DDP belong into `train`. Before each call all ranks get the last commit of any
/// of them, or at the beginning what rank 0 has. If a rank dies, the other ranks' calls fail at
/// once, `train` ends with that exception, and is called again when the launcher has replaced the
/// rank.
///
/// A spare (`--spares`) blocks here until it is needed, and has no RANK before.
///
/// Called once in a process: after it has finished, the launcher repairs nothing any more.
///
/// Exceptions: those of `train` that have nothing to do with the end of an epoch, and those of a
/// group that failed without one (a timeout, a mismatch).
RunOutcome run(State& state, const std::function<void()>& train,
               const ElasticOptions& options = {});

/// Samples first to first + count - 1 of the batch of a step.
struct SampleRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  double weight = 0;  ///< for the mean loss over these samples
};

/// This rank's part of a step whose batch has `global_batch` samples whatever the world size is.
/// One range for each round of forward and backward, equally many on all ranks; no range has more
/// than `largest` samples (0: no limit, so one round). If the loss of a round is the mean over its
/// samples times `weight`, and DDP averages over the ranks, the gradients are those of the mean
/// over the whole batch, up to rounding. In all rounds but the last the gradients need no averaging
/// (`no_sync`). Throws DistError if a rank would have no sample in some round.
///
///   for (const auto& range : elastic::share_of_batch(256, 32)) {
///     auto [input, target] = samples(step, range.first, range.count);
///     (range.weight * cross_entropy(ddp.forward(input), target)).backward();
///   }
std::vector<SampleRange> share_of_batch(std::int64_t global_batch, std::int64_t largest = 0);

/// Number of the epoch of the job that this process is in, as MUSTER_EPOCH; 0: of none.
std::int64_t epoch();

}  // namespace muster::elastic
