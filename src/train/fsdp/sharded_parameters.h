// SPDX-License-Identifier: BSD-3-Clause
/// Bytes that sharded models hold beside their shards, counted where they are allocated and freed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/collectives.h"
#include "muster/process_group.h"
#include "muster/work.h"
#include "train/mesh/chunk.h"
#include "train/modules/module_parts.h"

namespace muster {
class Call;
}

namespace muster::parallel {
/// Bytes of one kind: now, and the most since the last reset. Thread-safe; the peak is exact only
/// if one thread at a time adds.
class ByteMeter {
 public:
  void add(std::int64_t bytes) {
    const std::int64_t now = now_ += bytes;
    if (now > peak_) peak_ = now;
  }
  void subtract(std::int64_t bytes) { now_ -= bytes; }
  std::int64_t now() const { return now_; }
  std::int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = now_.load(); }

  /// Counts bytes during its lifetime.
  class MeterScope {
   public:
    explicit MeterScope(ByteMeter& meter) : meter_(meter) {}
    MeterScope(MeterScope&& other) noexcept
        : meter_(other.meter_), bytes_(std::exchange(other.bytes_, 0)) {}
    ~MeterScope() { meter_.subtract(bytes_); }
    MeterScope(const MeterScope&) = delete;
    MeterScope& operator=(const MeterScope&) = delete;
    void add(std::int64_t bytes) {
      bytes_ += bytes;
      meter_.add(bytes);
    }

   private:
    ByteMeter& meter_;
    std::int64_t bytes_ = 0;
  };

 private:
  std::atomic<std::int64_t> now_ = 0, peak_ = 0;
};

/// The units on one group's ranks share one.
struct ShardedMeter {
  ByteMeter gathered;  ///< whole parameters, and parts of them kept between forward and backward
  ByteMeter staging;   ///< whole gradients and buffers of reductions, while they are reduced
};

// Memory for tensors of the meta device.

/// Gives a tensor of the meta device memory on `device`, with undefined values. It stays the same
/// tensor, for all who have it.
inline void materialize(const at::Tensor& tensor, at::Device device) {
  const at::NoGradGuard no_grad;
  const at::Tensor memory =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
}

// Sharded parameters: each rank stores one shard, all shards have the same length, and the
// parameters are whole only while needed. In hybrid sharding several groups of ranks hold the same
// shards, and gradients are averaged over all of them.
//
// A parameter keeps its identity as a tensor. It contains either all of its values (unsharded) or
// those in this rank's shard, possibly none (sharded). There are two ways to divide:
//
// - By rows: each parameter by itself along one of its dimensions, as torch.chunk does. A sharded
//   parameter has the shape of the whole but for that dimension. Parameters of one dtype share a
//   shard, so that one call gathers them all; it fills a buffer of the ranks' shards, from which
//   the rows are copied to the whole parameters.
// - Flat: parameters of one dtype are concatenated into one tensor, which is cut into one shard per
//   rank. A sharded parameter has one dimension.
//
// Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023;
// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
// 2020.

struct ShardingOptions {
  Group group = nullptr;  ///< each member stores one shard
  /// Dtype of unsharded floating-point parameters; default: their own.
  std::optional<at::ScalarType> param_dtype = {};
  /// Dtype in which gradients are reduced; default: that of the unsharded parameters.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Without reduce_dtype: reduce gradients in the parameters' own dtype.
  bool reduce_in_own_dtype = false;
  /// Equal on all members and unique to each set of parameters. It changes the length of
  /// reductions, so that ranks out of step get a mismatch error instead of mixing two sets.
  int number = 0;
  /// The ranks that hold the same shard as this one; null: no other rank does.
  Group replicas = nullptr;
  /// Device of whole parameters; default: the parameters' own.
  std::optional<at::Device> device = {};
  /// Shards, and with them their gradients and the optimizer's state, are on the CPU; in
  /// page-locked memory if `pin_memory` is set and the device can use it.
  bool offload = false, pin_memory = true;
  std::shared_ptr<ShardedMeter> meter = {};  ///< null: an own one
  /// By rows: for each parameter the dimension that is divided. Default: flat.
  std::optional<std::vector<std::int64_t>> shard_dims = {};
};

/// How one set of parameters communicates. An empty function replaces nothing.
struct ShardedCommunication {
  /// Called like all_gather_into_tensor and reduce_scatter_tensor (sum). They block.
  using Exchange =
      std::function<void(const at::Tensor& output, const at::Tensor& input, const Group& group)>;
  Exchange all_gather = {}, reduce_scatter = {};
  /// Called with shards that are to be summed over the replicas, in place.
  std::function<void(const at::Tensor& gradients, const Group& group)> all_reduce = {};
  /// Called with each reduced shard of gradients, after the sum over replicas.
  std::function<void(const at::Tensor& gradients)> after_reduction = {};
  /// Gradients' sums are divided by this; default: the number of ranks that take part.
  std::optional<double> divisor = {};
  /// False: sums over the shards' group stay on this rank; the next reduction with true takes them
  /// along to the replicas.
  bool reduce_over_replicas = true;
  /// How gradients travel when they are reduced, and parameters when a pass gathers them, unless a
  /// function replaces the call. Parts that are kept between forward and backward, and full(), are
  /// gathered without compression.
  Compression gradient_compression = Compression::none;
  Compression parameter_compression = Compression::none;
};

/// The place of the whole values between forward and backward.
enum class Keep {
  nothing,  ///< freed
  part,     ///< divided among the ranks of a part of the group
  all,      ///< in memory
};

/// Whether unshard() communicates.
enum class Gather {
  anew,        ///< also if the values are there, unless start_gather() has got the current ones
  if_changed,  ///< only if the values are not there or the shards were changed since
  if_absent,   ///< only if the values are not there
  never,       ///< memory with undefined values, if they are not there
};

/// Not thread-safe. All members make the collective calls alike. A parameter's `grad()` has the
/// form of the parameter; while the parameter is whole, the shard's gradient is kept separately.
class ShardedParameters {
 public:
  /// Shards the parameters' current values. Parameters must be distinct, strided and on one device.
  /// By rows, parameters on the meta device get memory for their shards, on `options.device` or the
  /// CPU: NaN until they are set, so that a forgotten initialisation shows. No communication.
  ShardedParameters(std::vector<ModuleParts::Named> parameters, ShardingOptions options);
  ~ShardedParameters();
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

  std::size_t size() const { return parameters_.size(); }
  const at::Tensor& operator[](std::size_t index) const { return parameters_[index].tensor; }
  const std::string& name(std::size_t index) const { return parameters_[index].name; }
  /// The shape of the whole parameter.
  at::IntArrayRef sizes_of(std::size_t index) const { return whole_[index].sizes(); }
  /// Index of the first row-major element of the whole parameter that is in this rank's shard. By
  /// rows for dimension 0 only; rows_of() has the others.
  std::int64_t first_of(std::size_t index) const { return own_range(index).in_parameter; }
  /// By rows: the dimension that is divided, and this rank's part of it; none where flat.
  struct ShardRows {
    std::int64_t dim, first, count;
  };
  std::optional<ShardRows> rows_of(std::size_t index) const;
  /// This rank's shard, also while the parameter is whole, in a storage of its own. Shares its
  /// memory and, with the parameter, its version counter: a change of it in place is a change of
  /// the parameter.
  const at::Tensor& shard(std::size_t index) const { return aliases_[index]; }
  const Group& group() const { return options_.group; }
  const Group& replicas() const { return options_.replicas; }
  bool is_unsharded() const { return is_unsharded_; }
  bool any_trained() const;
  /// Whether `tensor` uses the memory of the unsharded parameters.
  bool is_in_unsharded(const at::Tensor& tensor) const;
  /// Bytes of memory of the unsharded parameters now.
  std::int64_t unsharded_bytes() const;

  /// Bytes of this rank's shards.
  std::int64_t shard_bytes() const;
  /// Bytes of the shards' gradients and of what waits for its reduction.
  std::int64_t gradient_bytes() const;
  ShardedMeter& meter() { return *options_.meter; }
  ShardedCommunication& communication() { return communication_; }

  /// Makes the parameters whole; collective where `gather` says so. A graph recorded earlier sees
  /// the values again. Takes what start_gather() has begun.
  void unshard(Gather gather);
  /// Collective. Begins to gather values that are not in memory, and returns at once. `when_done`
  /// is called once they are there, on a thread of its own.
  void start_gather(const std::function<void()>& when_done = {});
  /// Whether start_gather() has begun something that nothing has taken yet, and whether that is
  /// done. Never block.
  bool is_gathering() const;
  bool has_gathered() const;
  /// The memory of whole values stays allocated, at one address, while they are not there.
  void set_keep_storage(bool on) { keeps_storage_ = on; }
  /// Makes the parameters sharded. Waits for a gather under way. `Keep::part` needs
  /// set_part().
  void reshard(Keep keep);
  /// The group that keeps the parts: consecutive ranks of the shards' group, whose size divides
  /// its.
  void set_part(Group part) { part_ = std::move(part); }

  /// While unsharded: moves the parameters' gradients out and adds them to those collected earlier.
  /// `will_wait`: more will be collected before the reduction; they accumulate in the dtype of the
  /// reduction.
  void collect_gradients(bool will_wait);
  /// Collective. Begins to average the collected gradients over the ranks. Returns at once where
  /// that can go on while this thread computes, else once it is done.
  void start_reduction();
  /// Waits for what start_reduction() has begun, and adds this rank's shards of the averages to the
  /// shards' gradients. A parameter for which no rank collected a gradient keeps its old one.
  void finish_reduction();
  /// Takes the averages instead: called by finish_reduction(), on its thread, once per parameter
  /// for which any rank collected a gradient, with this rank's shard, possibly without elements, in
  /// a storage of its own. It may change the shards. Empty: the gradients are added again.
  using GradientSink = std::function<void(std::size_t index, const at::Tensor& reduced)>;
  void set_gradient_sink(GradientSink sink) { gradient_sink_ = std::move(sink); }
  bool is_reducing() const { return !reductions_.empty(); }
  /// Also what start_reduction() has begun.
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
  static constexpr std::int64_t kFlat = -1;

  /// Parameters in one allocation.
  struct Flat {
    at::TensorOptions options;
    at::ScalarType unsharded_dtype, reduced_dtype;
    std::vector<std::size_t> indices;
    std::int64_t shard_elements = 0;  // equal on every rank
    std::int64_t whole_elements = 0;
    bool is_direct = true;  // the ranks' shards one behind the other are the whole
    at::Tensor shard;
    at::Tensor unsharded;      // its memory is allocated and freed; tensors in it persist
    bool has_values = false;   // the whole is there, or a gather of it is under way
    bool is_started = false;   // by start_gather(), and not taken
    std::int64_t version = 0;  // of the shards that were gathered
    at::Tensor kept;           // this rank's part of the whole between forward and backward
    at::Tensor sent;           // what a gather under way sends
    at::Tensor wire;           // not direct: what it fills
    WorkRef gather;
    at::Tensor partial;  // reduced over the shards' group and not over the replicas
  };
  /// A reduction under way. `staged` keeps what it reads.
  struct Reduction {
    std::size_t flat;
    at::Tensor staged, reduced;
    std::vector<WorkRef> works;  // null ones are done
    ByteMeter::MeterScope staging;
  };
  struct ShardPlace {
    std::size_t flat = 0;
    std::int64_t at = 0, elements = 0;  // in the whole
    std::int64_t dim = kFlat;           // divided by rows
    std::int64_t in_shard = 0;          // by rows: the same in every rank's shard
  };
  /// The elements of a parameter in one rank's shard.
  struct ShardRange {
    int rank = 0;
    std::int64_t in_shard = 0, in_parameter = 0, elements = 0;
  };

  static std::int64_t aligned_elements(const Flat& flat);
  at::Tensor shard_memory(const Flat& flat) const;
  void lay_out();
  void choose_flats();
  void place_rows(Flat& flat);
  void place_flat(Flat& flat);
  void shard_parameter(const Flat& flat, std::size_t index);
  at::Tensor own_rows(std::size_t index, const at::Tensor& whole) const;
  using RowBlocks = std::vector<std::pair<at::Tensor, at::Tensor>>;
  RowBlocks row_blocks(std::size_t index, const at::Tensor& whole, const at::Tensor& lines) const;
  bool has_plain_rows(std::size_t index, const at::Tensor& tensor) const;
  template <class Visit>
  void each_rank(std::size_t index, const Visit& visit) const;
  void copy_rows(const Flat& flat, const at::Tensor& wire,
                 const std::vector<at::Tensor>& whole) const;
  std::vector<ShardRange> ranges_of(std::size_t index) const;
  ShardRange own_range(std::size_t index) const;
  void check_unchanged() const;
  void start_gather(Flat& flat, bool async_op);
  void finish_gather(Flat& flat);
  void allocate(Flat& flat);
  void drop_wire(Flat& flat);
  void drop_part(Flat& flat);
  void free(Flat& flat);
  std::int64_t version_of(const Flat& flat) const;
  void show_whole(const std::vector<at::Tensor>& whole);
  void show_shards();
  at::Tensor staged_gradients(Flat& flat, ByteMeter::MeterScope& staging);
  void clear_padding(const Flat& flat, const at::Tensor& lines) const;
  void stage_gradient(std::size_t index, const at::Tensor& lines, double factor);
  void start_reduction(std::size_t number, bool async_op);
  Call& tagged(Call& call) const;
  WorkRef submit(ProcessGroup& group, Call&& call) const;
  WorkRef gather_into(const at::Tensor& filled, const Flat& flat, const Group& group,
                      bool async_op) const;
  std::vector<WorkRef> sum_over_ranks(const Flat& flat, const at::Tensor& lines,
                                      const at::Tensor& reduced, bool async_op) const;
  std::vector<WorkRef> sum_over_replicas(const Flat& flat, const at::Tensor& reduced,
                                         bool async_op) const;
  bool reduces_beside_computation() const;
  void add_to_gradients(const Flat& flat, const at::Tensor& reduced);

  std::vector<ModuleParts::Named> parameters_;
  ShardingOptions options_;
  ShardedCommunication communication_;
  Group part_;
  std::vector<Flat> flats_;
  std::vector<ShardPlace> places_;
  std::vector<at::Tensor> shards_, whole_;  // the two forms
  std::vector<const void*> starts_;         // of the shards in the flats' memory
  std::vector<at::Tensor> aliases_;         // of the shards, for shard()
  GradientSink gradient_sink_;
  std::vector<at::Tensor> shard_gradients_;  // set while the parameters are whole
  std::vector<at::Tensor> sums_;             // sums of whole gradients not reduced yet
  std::vector<Reduction> reductions_;        // in the order of their calls
  bool is_unsharded_ = false, shows_full_ = false, keeps_storage_ = false;
};

/// Calls visit(rank, first, elements) for each rank that has some of parameter `index`, which is
/// divided along dimension 0, with the place of its rows in the whole.
template <class Visit>
void ShardedParameters::each_rank(std::size_t index, const Visit& visit) const {
  const std::int64_t elements = places_[index].elements, size = sizes_of(index)[0];
  if (elements == 0) return;
  const std::int64_t step = chunk_of(size, options_.group->size(), 0).count * (elements / size);
  int rank = 0;
  for (std::int64_t first = 0; first < elements; first += step)
    visit(rank++, first, std::min(step, elements - first));
}

}  // namespace muster::parallel
