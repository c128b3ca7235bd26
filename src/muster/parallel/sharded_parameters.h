/// Sharded parameters: each rank stores one shard, all shards have the same length, and the
/// parameters are whole only while needed.
///
/// Parameters of one dtype are concatenated into one flat tensor, which is cut into one shard per
/// rank. A parameter keeps its identity as a tensor. It contains either all of its values
/// (unsharded) or, in one dimension, those in this rank's shard, possibly none (sharded). Zhao et
/// al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari
/// et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/parallel/module_parts.h"
#include "muster/process_group.h"

namespace muster::parallel {

struct ShardingOptions {
  Group group = nullptr;  ///< each member stores one shard
  /// Dtype of unsharded floating-point parameters; default: their own.
  std::optional<at::ScalarType> param_dtype = {};
  /// Dtype in which gradients are reduced; default: that of the unsharded parameters.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Equal on all members and unique to each set of parameters. It changes the length of
  /// reductions, so that ranks out of step get a mismatch error instead of mixing two sets.
  int number = 0;
};

/// Not thread-safe. All members make the collective calls alike. A parameter's `grad()` has the
/// form of the parameter; while the parameter is whole, the shard's gradient is kept separately.
class ShardedParameters {
 public:
  /// Shards the parameters' current values. Parameters must be distinct, strided and on one device.
  /// No communication.
  ShardedParameters(std::vector<ModuleParts::Named> parameters, ShardingOptions options);
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

  std::size_t size() const { return parameters_.size(); }
  const at::Tensor& operator[](std::size_t index) const { return parameters_[index].tensor; }
  const std::string& name(std::size_t index) const { return parameters_[index].name; }
  /// The shape of the whole parameter.
  at::IntArrayRef sizes_of(std::size_t index) const { return whole_[index].sizes(); }
  /// Of the row-major elements of the whole parameter, the first one in this rank's shard.
  std::int64_t first_of(std::size_t index) const { return own_range(index).in_parameter; }
  bool is_unsharded() const { return is_unsharded_; }
  bool any_trained() const;
  /// Whether `tensor` uses the memory of the unsharded parameters.
  bool is_in_unsharded(const at::Tensor& tensor) const;
  /// Bytes of memory of the unsharded parameters now.
  std::int64_t unsharded_bytes() const;

  /// Makes the parameters whole. Collective if their memory is absent or `gather_anew` is set. A
  /// graph recorded earlier sees the values again.
  void unshard(bool gather_anew);
  /// Makes the parameters sharded. `keep_memory` keeps the whole values for a graph that is about
  /// to need them; otherwise the memory is freed.
  void reshard(bool keep_memory);

  /// While unsharded: moves the parameters' gradients out and adds them to those collected earlier.
  /// `will_wait`: more will be collected before the reduction; they accumulate in the dtype of the
  /// reduction.
  void collect_gradients(bool will_wait);
  /// Collective. Averages the collected gradients over the ranks and adds each rank's shards to the
  /// shards' gradients. A parameter for which no rank collected a gradient keeps its old one.
  void reduce_gradients();
  void drop_gradients();

  /// Collective, in either form. Returns the values of each whole parameter in its own dtype; after
  /// show_full(), the tensors shown.
  std::vector<at::Tensor> full() const;
  /// As full(), for other tensors: one per parameter, as long as its shard here, all of one dtype.
  std::vector<at::Tensor> full_of(const std::vector<at::Tensor>& shards) const;
  /// A copy of this rank's shard of `whole`, which has the shape of parameter `index`.
  at::Tensor shard_of(std::size_t index, const at::Tensor& whole) const;
  /// While sharded: sets the parameter to this rank's shard of `whole`.
  void set(std::size_t index, const at::Tensor& whole);

  /// Replaces the parameters' values by whole tensors, as returned by full().
  void show_full(const std::vector<at::Tensor>& whole);
  /// Ends show_full(). `keep_values`: updates the shards from the parameters' values.
  void end_show_full(bool keep_values);

 private:
  /// Parameters in one allocation.
  struct Flat {
    at::TensorOptions options;
    at::ScalarType unsharded_dtype, reduced_dtype;
    std::vector<std::size_t> indices;
    std::int64_t shard_elements = 0;  // equal on every rank
    at::Tensor shard;
    at::Tensor unsharded;  // its memory is allocated and freed; tensors in it persist
    bool is_allocated = false;
  };
  struct Place {
    std::size_t flat = 0;
    std::int64_t at = 0, elements = 0;
  };
  /// The elements of a parameter in one rank's shard.
  struct ShardRange {
    int rank = 0;
    std::int64_t in_shard = 0, in_parameter = 0, elements = 0;
  };

  static std::int64_t aligned_elements(const Flat& flat);
  void lay_out();
  std::vector<ShardRange> ranges_of(std::size_t index) const;
  ShardRange own_range(std::size_t index) const;
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
  std::vector<at::Tensor> shard_gradients_;  // set while the parameters are whole
  std::vector<at::Tensor> sums_;             // sums of whole gradients not reduced yet
  bool is_unsharded_ = false, shows_full_ = false;
};

}  // namespace muster::parallel
