/// Averages the gradients of a list of parameters over the ranks while backward is still running.
///
/// Parameters are divided into buckets (`bucket_plan.h`). As soon as the gradients of a bucket are
/// there, its all-reduce starts; buckets start strictly in their order, so that all ranks agree on
/// it whatever order their gradients come in. After the first backward pass the buckets are laid
/// out anew by the order in which rank 0's gradients came. It knows no module and no Python. After:
/// Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/group/process_group.h"
#include "muster/parallel/backward_frame.h"
#include "muster/parallel/comm_hook.h"

namespace muster::parallel {

struct ReducerOptions {
  /// Must be the reducer's own: nobody else's calls may come between its own. All members make
  /// their reducers alike.
  Group group = nullptr;
  std::vector<std::string> names = {};  ///< of the parameters, for errors; empty: by number
  std::string model_name = {};          ///< for the log
  std::int64_t first_bucket_bytes = std::int64_t{1} << 20;
  std::int64_t bucket_cap_bytes = std::int64_t{25} << 20;
  /// A gradient of at least so many bytes travels by itself, where it lies: nothing is copied into
  /// a bucket and back. Only where there is neither a hook nor gradient_as_bucket_view.
  std::int64_t in_place_bytes = std::int64_t{64} << 10;
  bool find_unused_parameters =
      false;  ///< look for parameters that the outputs do not depend on; they count as zero
  bool gradient_as_bucket_view =
      false;                  ///< gradients alias the buckets: one copy less, and half the memory
  bool static_graph = false;  ///< every pass uses the same parameters as often as the first
  /// Which parameters get sparse gradients; empty: none. Those travel alone, and become the sparse
  /// averages.
  std::vector<bool> sparse = {};
  /// What gradients travel as, where that is not their parameter's dtype. Goes without
  /// gradient_as_bucket_view.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Buckets wait for this one's gradient (of the reducer or not) or the end of backward;
  /// undefined: they start as soon as they are full.
  at::Tensor held_until = {};
  /// Called at the end of each backward pass that gave gradients after a forward that was
  /// announced, reduced or not, on the thread that ends it.
  std::function<void()> on_backward_end = {};
  BackwardFrame frame = {};
};

/// Made, used and destroyed by the thread that runs the model; its hooks run on autograd's threads.
/// Parameters must be leaves that require gradients and must outlive it or be held elsewhere; they
/// keep their place and shape.
///
/// A backward pass that an exception ends aborts the group, so that the ranks that wait for this
/// one's gradients learn of it. A second one over the same forward pass, which is refused here,
/// does so where no other forward follows it before this ends.
class Reducer {
 public:
  Reducer(std::vector<at::Tensor> parameters, ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Throws DistError where the last pass was not finished, naming the parameters that got no
  /// gradient, or what failed in it.
  void check_finished() const;
  /// Before a forward pass whose gradients will be averaged. Throws what check_finished() throws.
  /// Lays the buckets out anew after the first pass: then all members meet here.
  void prepare_forward();
  /// After it: `outputs` are the tensors that the loss will be made of. Backward on them then
  /// reduces, and has reduced when it returns.
  void prepare_backward(std::span<const at::Tensor> outputs);
  /// After a forward pass whose gradients only add up locally (`no_sync`).
  void skip_backward(std::span<const at::Tensor> outputs);
  /// In place of a forward and a backward pass, for a rank that has no input in this iteration
  /// while others have: makes the calls that theirs make, with zeros. Gradients here become the
  /// averages. After prepare_forward().
  void shadow_backward();

  /// What sums are divided by from the next backward pass on; at first the size of the group.
  void set_divisor(int ranks);
  /// To be called when parameters have been given memory of another dtype: autograd then knows them
  /// anew.
  void follow_parameters();

  /// Instead of averaging; before the first backward pass.
  void set_hook(CommHook hook);
  /// How many iterations lie between two whose times are taken, after the first ten.
  void set_sample_rate(int iterations);

  /// Bytes of each bucket, in order.
  std::vector<std::int64_t> bucket_bytes() const;
  /// How many gradients of the last pass travelled where they lay.
  std::size_t in_place() const;
  /// Whether nothing is under way: no gradients have come that are not averaged, and no pass has
  /// failed or was refused.
  bool is_quiet() const;
  /// Whether the buckets stand in the order of the gradients.
  bool rebuilt() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace muster::parallel
