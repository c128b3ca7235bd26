// SPDX-License-Identifier: BSD-3-Clause
/// The state of a Reducer. Private to `reducer.cc` (before backward) and `reducer_backward.cc`
/// (during and after it).
#pragma once

#include <torch/types.h>

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/group/memory/shared_allocator.h"
#include "train/ddp/parameter_use.h"
#include "train/ddp/reducer/gradient_copies.h"
#include "train/ddp/reducer/gradient_hooks.h"
#include "train/ddp/reducer/gradient_layout.h"
#include "train/ddp/reducer/reducer.h"
#include "train/modules/ddp_logging.h"

namespace muster::parallel {

struct Reducer::State : std::enable_shared_from_this<State> {
  using Bucket = GradientBucket;
  struct Hook;
  /// One backward pass.
  struct Pass {
    /// Treatment of arriving gradients. `done`: after a reduced pass, before the next forward.
    enum class PassMode { local, reduce, done } mode = PassMode::local;
    bool in_flight = false;  // some gradients have come that are not averaged yet
    bool end_queued = false;
    bool has_gradients = false;
    bool released = false;  // see ReducerOptions::held_until
    // Used at the end if no core is free: each call completes before the next begins, and needs
    // neither a Work nor another thread.
    bool sequential = false;
    // A thread is in a hook, possibly without the lock; it also launches buckets that become ready
    // meanwhile.
    bool is_launching = false;
    std::size_t next = 0;  // next bucket to launch
    std::vector<bool> ready;
  };

  State(std::vector<at::Tensor> parameters, ReducerOptions given);
  void attach();
  void share_in_place_gradients();

  // Before backward.
  void check_finished() const;
  void rebuild();
  void arm(std::span<const at::Tensor> outputs);
  void watch_backward(std::span<const at::Tensor> outputs);

  // During it.
  void begin_backward();
  void release();
  void on_gradient(std::size_t index, const std::vector<at::Tensor>& given);
  void mark_ready(std::size_t index);
  void launch_full();
  void launch(std::size_t number);

  // After it.
  void end_backward();
  void wait_for_rest();
  void reduce_rest();
  [[noreturn]] void rethrow() const;
  void on_broken_backward() noexcept;
  void abort_group(const std::exception_ptr& cause) const noexcept;
  void finish_pass();
  at::Tensor finish_bucket(Bucket& bucket);
  void end_statistics();
  /// Instead of it.
  void shadow();

  std::shared_ptr<void> manual_progress() const;
  bool is_held() const { return options.held_until.defined() && !pass.released; }

  const ReducerOptions options;
  GradientLayout layout;
  ParameterUse use;
  GradientCopies copies;
  std::unique_ptr<GradientHooks> hooks;
  CommHook hook;

  // Guards all that is not const. Autograd's threads take it in the hooks of gradients.
  // Communication hooks and aborts run without it, since they are or call the user's code.
  mutable std::mutex mutex;
  Pass pass;
  std::optional<group::SharedSizes> shared_sizes;  // of gradients reduced in place
  // Set from the first gradient to the end if this thread must drive the communication.
  std::shared_ptr<void> driving;
  std::vector<std::size_t> arrived;  // order of the gradients in the first pass
  bool is_rebuilt = false;
  std::exception_ptr failure;
  // Error of a second backward pass: cleared at the next forward; reported to the other ranks if
  // none follows.
  std::exception_ptr refused;
  struct {
    std::int64_t iteration = 0;
    IterationTimes times;
    RuntimeStatistics statistics;
  } timing;
};

}  // namespace muster::parallel
