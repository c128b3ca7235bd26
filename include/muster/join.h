// SPDX-License-Identifier: BSD-3-Clause
/// Training with uneven inputs: a rank that has run out of inputs takes part in the other ranks'
/// collectives until all have run out.
///
/// Modelled on torch.distributed.algorithms.join. A Joinable communicates in each iteration; its
/// hook makes the same collectives on behalf of a rank without inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <any>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/process_group.h"
#include "muster/work.h"

namespace muster {

struct JoinOptions {
  /// False: all ranks have equally many inputs; nothing is tracked and no hook runs.
  bool enable = true;
  /// True: every rank throws once one has run out. False: that rank shadows the others.
  bool throw_on_early_termination = false;
  /// For DistributedDataParallel. False: average over the ranks that still have inputs.
  bool divide_by_initial_world_size = true;
  std::map<std::string, std::any> kwargs = {};  ///< for user-defined joinables
};

/// The actions of a rank without inputs. Join calls it on the thread that finishes the Join. An
/// exception ends the Join.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  /// Called once per iteration of the ranks that still have inputs; makes the collectives they make
  /// in it.
  virtual void main_hook() {}
  /// Called once, when all ranks have run out. `is_last_joiner`: this rank was among the last to
  /// run out; at least one rank was.
  virtual void post_hook(bool is_last_joiner) { static_cast<void>(is_last_joiner); }
};

class Join;

/// A class that communicates in each iteration. It calls Join::notify_join_context(*this) before
/// its collectives.
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  virtual ~Joinable() = default;

  /// Called once, at construction, by each Join this object takes part in. All joinables of a Join
  /// get the same options.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  /// Device of the tensors Join communicates. The first joinable's counts.
  virtual c10::Device join_device() const = 0;
  /// The ranks that share the inputs; equal for all joinables of a Join. The Join's own calls use
  /// the first joinable's group. A joinable's calls of an iteration must follow its notice, in the
  /// same order on every rank.
  virtual Group join_process_group() const = 0;
  /// Called by Join when this rank has run out of inputs, before the first hook. Throw if some
  /// calls of the last iteration, which other ranks wait for, were not made; that ends the Join.
  virtual void end_of_inputs() {}

 protected:
  /// Whether this object is in a Join and this rank still has inputs.
  bool takes_part_in_join() const { return join_ != nullptr; }

 private:
  friend class Join;
  Join* join_ = nullptr;  // the Join this object takes part in
};

/// The result of notify_join_context. Empty, with `active_ranks()` 0, if nothing was sent: outside
/// a Join, in a disabled one, and for all joinables but the first.
class JoinNotice {
 public:
  JoinNotice() = default;
  JoinNotice(WorkRef work, at::Tensor active)
      : work_(std::move(work)), active_(std::move(active)) {}
  explicit operator bool() const { return active_.defined(); }
  /// Waits for the notice. Returns the number of ranks that have inputs in this iteration.
  int active_ranks() const;

 private:
  WorkRef work_;       // null once completed
  at::Tensor active_;  // 1 for each rank that has inputs
};

/// Between construction and finish(), ranks may run out of inputs at different times:
///
///   Join join({&model, &optimizer});
///   join.run([&] {
///     for (auto& batch : my_share) { ...; loss.backward(); optimizer.step(); }
///   });                       // here every rank has run out, and the models are equal again
///
/// All members of the group construct and finish it. `run(body)` calls `body()` and then
/// `finish()`. If body throws, the exception propagates and `finish()` is not called. The
/// destructor never communicates: if a Join is destroyed unfinished, the other ranks wait for this
/// rank until their deadline. That is logged as an error unless an exception is propagating. Use it
/// from one thread; the joinables must outlive it.
class Join {
 public:
  using Options = JoinOptions;
  /// Throws DistError if the list is empty, contains null or a duplicate or a joinable that is in
  /// another Join, or if the joinables' ranks differ.
  explicit Join(std::vector<Joinable*> joinables, const Options& options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Declares that this rank has run out of inputs; call it once. Shadows the other ranks until
  /// they have run out too, then runs the post hooks. With throw_on_early_termination, if another
  /// rank still has inputs, throws DistError (Code::mismatch) on all ranks instead; `ranks()` are
  /// those that have run out.
  void finish();

  template <class Body>
  void run(Body&& body) {
    std::forward<Body>(body)();
    finish();
  }

  /// Called by a joinable before its collectives of an iteration: this rank still has inputs.
  /// Non-blocking, unless throw_on_early_termination is set; then it throws as `finish` does once
  /// some rank has run out.
  static JoinNotice notify_join_context(Joinable& joinable);

 private:
  JoinNotice notify();
  void shadow(const at::Tensor& active, std::int64_t iteration);
  void leave();
  [[noreturn]] void stop(const at::Tensor& active) const;

  std::vector<Joinable*> joinables_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  Options options_;
  Group group_;
  int exceptions_;
};

}  // namespace muster
