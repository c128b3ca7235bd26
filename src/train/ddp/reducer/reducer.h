// SPDX-License-Identifier: BSD-3-Clause
/// Averages the gradients of a list of parameters across ranks while backward is still running.
///
/// Parameters are divided into buckets (`bucket_plan.h`). A bucket's all-reduce starts once all its
/// gradients are there. Buckets start strictly in order, so that all ranks agree on it regardless
/// of the order of their gradients. After the first backward pass, buckets are rebuilt in the order
/// in which rank 0's gradients came. The reducer is independent of modules and of Python. Li et
/// al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/tunables/tunables_fixed.h"
#include "muster/comm_hook.h"
#include "muster/process_group.h"
#include "train/modules/backward_frame.h"

namespace muster::parallel {

struct ReducerOptions {
  /// Must be used by this reducer only: no other calls may come between its own. All members
  /// construct their reducers alike.
  Group group = nullptr;
  std::vector<std::string> names = {};  ///< of the parameters, for errors; empty: numbers are used
  std::string model_name = {};          ///< for the log
  std::int64_t first_bucket_bytes = std::int64_t{1} << 20;  // limit: torch's default
  std::int64_t bucket_cap_bytes = std::int64_t{25} << 20;   // limit: torch's default
  /// A gradient of at least this size is reduced separately and in place, without copies into and
  /// out of a bucket. Requires that there is no hook and no gradient_as_bucket_view.
  std::int64_t in_place_bytes = fixed::kInPlaceGradient;
  /// Find parameters the outputs do not depend on; their gradients count as zero.
  bool find_unused_parameters = false;
  /// Gradients alias the buckets: saves one copy and half the memory.
  bool gradient_as_bucket_view = false;
  /// Every pass uses the same parameters, each as often as in the first.
  bool static_graph = false;
  /// Parameters with sparse gradients; empty: none. These are reduced separately, and the gradient
  /// becomes the sparse average.
  std::vector<bool> sparse = {};
  /// Dtype in which gradients are reduced, if not their parameter's. Incompatible with
  /// gradient_as_bucket_view.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Buckets start only after this tensor's gradient (of the reducer or not) or the end of
  /// backward. Undefined: buckets start as soon as they are full.
  at::Tensor held_until = {};
  /// Called at the end of each backward pass that produced gradients after an announced forward,
  /// reduced or not, on the thread that ends it.
  std::function<void()> on_backward_end = {};
  BackwardFrame frame = {};
};

/// Constructed, used and destroyed on the thread that runs the model; its hooks run on autograd's
/// threads. Parameters must be leaves that require gradients, must outlive the reducer or be held
/// elsewhere, and must keep their memory and shape.
///
/// If an exception ends a backward pass, the group is aborted, so that ranks waiting for this
/// rank's gradients learn of it. A second backward pass over the same forward is refused; it aborts
/// the group too, unless another forward follows before the reducer is destroyed.
class Reducer {
 public:
  Reducer(std::vector<at::Tensor> parameters, ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Throws DistError if the last pass was not finished; the error names the parameters without a
  /// gradient or the failure.
  void check_finished() const;
  /// Call before a forward pass whose gradients are to be averaged. Throws as check_finished()
  /// does. After the first pass it rebuilds the buckets, which is collective.
  void prepare_forward();
  /// Call after that forward pass. `outputs` are the tensors the loss is computed from. Backward on
  /// them reduces the gradients before it returns.
  void prepare_backward(std::span<const at::Tensor> outputs);
  /// Call after a forward pass whose gradients only accumulate locally (`no_sync`).
  void skip_backward(std::span<const at::Tensor> outputs);
  /// Replaces a forward and a backward pass on a rank that has no input in this iteration: makes
  /// the other ranks' calls with zeros. Gradients here become the averages. Call after
  /// prepare_forward().
  void shadow_backward();

  /// Divisor of the sums from the next backward pass on; initially the group's size.
  void set_divisor(int ranks);
  /// Call after parameters were given memory of another dtype, which makes autograd replace their
  /// accumulators.
  void reattach_hooks();

  /// Replaces averaging; call before the first backward pass.
  void set_hook(CommHook hook);
  /// Sets the interval between timed iterations, after the first 10.
  void set_sample_rate(int iterations);

  /// Bucket sizes in bytes, in order.
  std::vector<std::int64_t> bucket_bytes() const;
  /// Number of gradients of the last pass that were reduced in place.
  std::size_t in_place() const;
  /// True if nothing is in flight: every gradient that came is averaged, and no pass failed or was
  /// refused.
  bool is_idle() const;
  /// Whether the buckets follow the order of the gradients.
  bool rebuilt() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace muster::parallel
