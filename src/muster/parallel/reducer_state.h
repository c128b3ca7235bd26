/// What a Reducer consists of. Private to `reducer.cc` (buckets, before backward) and
/// `reducer_backward.cc` (during and after it).
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <exception>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "muster/group/shared_allocator.h"
#include "muster/parallel/bucket_plan.h"
#include "muster/parallel/ddp_logging.h"
#include "muster/parallel/reducer.h"

namespace muster::parallel {

struct Reducer::State : std::enable_shared_from_this<State> {
  using Node = torch::autograd::Node;
  using NodeRef =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  struct Bucket {
    BucketIndices indices;
    bool sparse = false;  // then of one parameter, and `memory` is this pass's gradient
    bool alone = false;   // of one large parameter
    at::ScalarType dtype = at::kFloat;  // of the gradients in it
    at::Tensor memory;  // what travels; of one that is alone: made when its gradient cannot travel
                        // where it lies
    at::Tensor in_place;  // the memory of such a gradient, while it travels
    std::vector<at::Tensor>
        views;  // of the memory; complex ones too, which travel as pairs of reals
    std::size_t pending = 0;
    WorkRef work;
    std::function<at::Tensor()> finish;  // with a hook
  };
  struct Place {
    std::size_t bucket = 0;
    std::size_t slot = 0;
  };
  struct Hook;

  State(std::vector<at::Tensor> parameters, ReducerOptions given);
  void attach();
  void attach_anew();
  void detach();

  std::vector<ParameterFacts> facts() const;
  void lay_out(const std::vector<BucketIndices>& plan);
  void lay_out_first();
  void give_memory(Bucket& bucket);
  void rebuild();
  void check_finished() const;
  void arm(std::span<const at::Tensor> outputs);
  void find_unused(std::span<const at::Tensor> outputs);
  void watch_backward(std::span<const at::Tensor> outputs);

  void begin_backward();
  void release();
  void on_gradient(std::size_t index, const std::vector<at::Tensor>& given);
  void mark_ready(std::size_t index);
  void mark_unused();
  void fill(std::size_t index);
  bool travels_in_place(std::size_t index, const at::Tensor& gradient) const;
  void fill_sparse(std::size_t index);
  at::Tensor no_values(const at::Tensor& parameter) const;
  void launch_full();
  ReduceOp averaging(at::ScalarType dtype) const;
  void launch(std::size_t number);
  void end_backward();
  [[noreturn]] void leave_backward() const;
  void left_in_the_middle() noexcept;
  void tell_others() const noexcept;
  void mark_static_first();
  void learn_static_use();
  bool nobody_used(std::size_t index) const;
  void finish_pass();
  at::Tensor finish_bucket(Bucket& bucket);
  void give_back(std::size_t index, const at::Tensor& averaged);
  void give_back_sparse(std::size_t index, const at::Tensor& averaged);
  void end_statistics();
  void shadow();
  void keep_averages(const Bucket& bucket, const at::Tensor& averaged);

  std::string name(std::size_t index) const;
  std::string names_of(const std::vector<std::size_t>& indices) const;
  const at::Tensor& view(std::size_t index) {
    Bucket& bucket = buckets[places[index].bucket];
    if (!bucket.memory.defined()) give_memory(bucket);
    return bucket.views[places[index].slot];
  }
  bool tracks_use() const { return options.find_unused_parameters && !options.static_graph; }
  bool is_held() const { return options.held_until.defined() && !released; }
  at::ScalarType travels_as(const at::Tensor& parameter) const {
    return parameter.is_floating_point() ? options.reduce_dtype.value_or(parameter.scalar_type())
                                         : parameter.scalar_type();
  }
  bool goes_alone(const at::Tensor& parameter) const {
    return !hook && !options.gradient_as_bucket_view && any_operation && parameter.is_cpu() &&
           parameter.is_floating_point() && travels_as(parameter) == parameter.scalar_type() &&
           static_cast<std::int64_t>(parameter.nbytes()) >= options.in_place_bytes;
  }
  bool is_sparse(std::size_t index) const {
    return index < options.sparse.size() && options.sparse[index];
  }

  const std::vector<at::Tensor> parameters;
  const ReducerOptions options;
  double divisor;
  bool any_operation = false;  // the group's backend has AVG and PREMUL_SUM
  CommHook hook;
  std::vector<NodeRef> accumulators;  // null for what is frozen
  std::vector<std::uintptr_t> hook_keys;

  mutable std::mutex mutex;
  std::vector<Bucket> buckets;
  std::vector<Place> places;
  std::size_t next = 0;    // the bucket to be launched next
  bool launching = false;  // a thread is in a hook, perhaps without the lock: it launches what
                           // comes meanwhile too
  struct {
    std::size_t index = SIZE_MAX, count = 1;
  } owners = {};  // of the gradient that arrives just now: how many tensors hold its memory where
                  // no user's does
  std::size_t went_in_place = 0;
  std::optional<group::SharedSizes> shared_sizes;  // of gradients that travel where they lie:
                                                   // autograd makes those in shared memory
  std::shared_ptr<void> driving =
      {};  // from the first gradient to the end, where this thread is to move what travels
  bool one_by_one = false;  // then, at the end: each call is done before the next begins, and needs
                            // no Work and no other thread
  /// What is done with gradients that come: `done` is after a pass that was reduced, before the
  /// next forward.
  enum class Mode { local, reduce, done } mode = Mode::local;
  bool under_way = false;  // gradients have come that are not averaged yet
  bool end_queued = false;
  bool gave_gradients = false;  // this pass
  bool released = false;        // see ReducerOptions::held_until
  std::vector<bool> ready;
  std::vector<std::size_t> arrived;  // order of the first pass
  bool has_rebuilt = false;
  std::vector<std::size_t> unused;  // found in this pass's graph
  bool unused_marked = false;
  at::Tensor used;  // 1 for each parameter that got a gradient here since the last reduction; then
                    // the sum over the ranks
  WorkRef used_work;
  std::exception_ptr failure;
  std::exception_ptr refused;  // of a second backward pass: forgotten at the next forward, told to
                               // the others where there is none

  // With a static graph: how often each parameter's gradient came in the first pass, and how often
  // it will still come in this one.
  bool static_known = false;
  std::vector<bool> static_use = {};  // by any rank; empty until it is known
  std::vector<int> static_counts;
  std::vector<int> static_left;
  std::vector<std::size_t> static_order;

  std::int64_t iteration = 0;
  IterationTimes times;
  RuntimeStatistics statistics;
};

}  // namespace muster::parallel
