/// Parameters that are divided among the ranks: each keeps one of equally long shards, and has them
/// whole only while they are needed.
///
/// Those of one dtype lie one behind the other in one flat piece, which is cut into as many shards
/// as there are ranks. A parameter stays the tensor that it was; what it holds is either all of its
/// values (unsharded) or, in one dimension, those of them that lie in this rank's shard (sharded;
/// there may be none). After: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
/// Parallel", VLDB 2023; Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
/// Parameter Models", SC 2020.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/group/process_group.h"
#include "muster/parallel/module_parts.h"

namespace muster::parallel {

struct ShardingOptions {
  Group group = nullptr;  ///< a shard on each of its members
  std::optional<at::ScalarType> param_dtype =
      {};  ///< of unsharded parameters of floating point; absent: their own
  std::optional<at::ScalarType> reduce_dtype =
      {};  ///< what gradients travel as; absent: that of the unsharded parameters
  /// The same on all members, and another for each set of parameters: reductions of two sets differ
  /// in length then, and ranks that are out of step with each other are told, where equal ones
  /// would mix.
  int number = 0;
};

/// One thread at a time. All members call what is collective alike. A parameter's gradient is of
/// the form in which it is seen: while it is whole, its shard's gradient is kept aside.
class ShardedParameters {
 public:
  /// Shards them as they are; each of them once, strided, all on one device. Sends nothing.
  ShardedParameters(std::vector<ModuleParts::Named> parameters, ShardingOptions options);
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

  std::size_t size() const { return parameters_.size(); }
  const at::Tensor& operator[](std::size_t index) const { return parameters_[index].tensor; }
  const std::string& name(std::size_t index) const { return parameters_[index].name; }
  /// Of the whole parameter.
  at::IntArrayRef sizes_of(std::size_t index) const { return whole_[index].sizes(); }
  bool is_unsharded() const { return is_unsharded_; }
  bool any_trained() const;
  /// Whether it lies in the memory of the unsharded parameters.
  bool is_in_unsharded(const at::Tensor& tensor) const;
  /// Bytes that the unsharded parameters hold now.
  std::int64_t unsharded_bytes() const;

  /// Collective, where the memory is not there or `gather_anew`. A graph that was made before sees
  /// the values again.
  void unshard(bool gather_anew);
  /// `keep_memory`: for a graph that is about to need the values; else the memory is given back.
  void reshard(bool keep_memory);

  /// While unsharded: takes the parameters' gradients and adds them to those that were taken
  /// before. `will_wait`: more are to come before they are reduced; they add up in the type in
  /// which they will travel.
  void collect_gradients(bool will_wait);
  /// Collective: what was collected is averaged over the ranks, and each rank's shards of it added
  /// to the shards' gradients; a parameter of which no rank has collected one keeps what it has.
  void reduce_gradients();
  void drop_gradients();

  /// Collective, in any form: the values of each whole parameter, in its own dtype; those that are
  /// lent as they are.
  std::vector<at::Tensor> full() const;
  /// The same of other tensors of which there is one for each parameter, as long as its shard here,
  /// all of one dtype.
  std::vector<at::Tensor> full_of(const std::vector<at::Tensor>& shards) const;
  /// This rank's shard of `whole`, which has the sizes of parameter `index`: a copy.
  at::Tensor shard_of(std::size_t index, const at::Tensor& whole) const;
  /// While sharded: gives the parameter this rank's shard of other values.
  void set(std::size_t index, const at::Tensor& whole);

  /// Shows tensors of whole values, as full() gives them, in the parameters' place.
  void lend(const std::vector<at::Tensor>& whole);
  /// And ends that. `keep_values`: the shards become what the parameters hold now.
  void take_back(bool keep_values);

 private:
  /// What lies in one piece of memory.
  struct Flat {
    at::TensorOptions options;
    at::ScalarType unsharded_dtype, reduced_dtype;
    std::vector<std::size_t> indices;
    std::int64_t shard_elements = 0;  // the same on every rank
    at::Tensor shard;
    at::Tensor unsharded;  // its memory comes and goes under the tensors that lie in it
    bool is_there = false;
  };
  struct Place {
    std::size_t flat = 0;
    std::int64_t at = 0, elements = 0;
  };
  /// Elements of a parameter that lie in the shard of one rank.
  struct Stretch {
    int rank = 0;
    std::int64_t in_shard = 0, in_parameter = 0, elements = 0;
  };

  static std::int64_t aligned_elements(const Flat& flat);
  void lay_out();
  std::vector<Stretch> stretches_of(std::size_t index) const;
  Stretch mine(std::size_t index) const;
  void check_unchanged() const;
  void gather(Flat& flat);
  void show_whole(const std::vector<at::Tensor>& whole);
  void show_shards();
  void reduce(const Flat& flat);

  std::vector<ModuleParts::Named> parameters_;
  ShardingOptions options_;
  std::vector<Flat> flats_;
  std::vector<Place> places_;
  std::vector<at::Tensor> shards_, whole_;   // the two forms
  std::vector<at::Tensor> shard_gradients_;  // while the parameters are whole
  std::vector<at::Tensor> sums_;             // of whole gradients, that are not reduced yet
  bool is_unsharded_ = false, is_lent_ = false;
};

}  // namespace muster::parallel
