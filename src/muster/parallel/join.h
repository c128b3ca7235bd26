/// Training with uneven inputs: a rank that has run out takes part in the others' collectives until
/// all have.
///
/// After torch.distributed.algorithms.join. What communicates in each iteration is a Joinable; its
/// hook knows the collectives that a rank without inputs must make in its place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <any>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/group/process_group.h"

namespace muster {

struct JoinOptions {
  bool enable =
      true;  ///< false: every rank has as many inputs, nothing is watched and no hook runs
  bool throw_on_early_termination =
      false;  ///< every rank throws once one has run out; else that one shadows the others
  bool divide_by_initial_world_size =
      true;  ///< for DistributedDataParallel: false averages over the ranks that still have inputs
  std::map<std::string, std::any> kwargs = {};  ///< for joinables of your own
};

/// What a rank without inputs does. Called by Join on the thread that finishes it; may throw, which
/// ends the Join.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  /// Once for each iteration of the ranks that still have inputs: the collectives that they make in
  /// it.
  virtual void main_hook() {}
  /// Once, when all have run out. `is_last_joiner`: this rank was among the last to; at least one
  /// rank was.
  virtual void post_hook(bool is_last_joiner) { static_cast<void>(is_last_joiner); }
};

class Join;

/// A class that communicates in each iteration. Before its collectives it calls
/// Join::notify_join_context(*this).
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  virtual ~Joinable() = default;

  /// Called once by each Join that this takes part in, at its construction; the same options for
  /// all of its joinables.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  /// Where the few bytes lie that Join sends; the first joinable's counts.
  virtual c10::Device join_device() const = 0;
  /// The ranks that share the inputs: the same ranks for all joinables of a Join, whose own calls
  /// go through the first one's group. The joinable's calls of an iteration must come after its
  /// notice, in the same order on every rank.
  virtual Group join_process_group() const = 0;
  /// Called by Join when this rank has run out of inputs, before the first hook. To throw where the
  /// calls of the last iteration were not all made, for which other ranks wait; that ends the Join.
  virtual void end_of_inputs() {}

 protected:
  /// Whether it is in a Join whose inputs have not run out on this rank.
  bool takes_part_in_join() const { return join_ != nullptr; }

 private:
  friend class Join;
  Join* join_ = nullptr;  // the one it takes part in
};

/// What notify_join_context started. Empty, and `active_ranks()` 0, where nothing was sent: outside
/// a Join, in one that is not enabled, and for all joinables but the first.
class JoinNotice {
 public:
  JoinNotice() = default;
  JoinNotice(WorkRef work, at::Tensor active)
      : work_(std::move(work)), active_(std::move(active)) {}
  explicit operator bool() const { return active_.defined(); }
  /// Waits for it: how many ranks have inputs in this iteration.
  int active_ranks() const;

 private:
  WorkRef work_;       // null once it is done
  at::Tensor active_;  // 1 for each rank that has inputs
};

/// From its construction until it is finished, ranks may run out of inputs at different times:
///
///   Join join({&model, &optimizer});
///   join.run([&] {
///     for (auto& batch : my_share) { ...; loss.backward(); optimizer.step(); }
///   });                       // here every rank has run out, and the models are the same again
///
/// Made and finished by all members of the group. `run(body)` is `body()` and then `finish()`: what
/// body throws goes through, and this rank shadows nobody. The destructor never communicates: a
/// Join that is destroyed unfinished leaves the others waiting for this rank until their deadline;
/// unless an exception passes, that is logged as the mistake it is. One thread; the joinables must
/// outlive it.
class Join {
 public:
  using Options = JoinOptions;
  /// Throws DistError for no joinable, null, one that is given twice or takes part in another Join,
  /// or several sets of ranks.
  explicit Join(std::vector<Joinable*> joinables, const Options& options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// This rank has run out of inputs: shadows the others until they have too, then runs the post
  /// hooks. Where throw_on_early_termination is set and another rank still has inputs, throws
  /// DistError (Code::mismatch) on all instead, with the ranks that have run out. Once.
  void finish();

  template <class Body>
  void run(Body&& body) {
    std::forward<Body>(body)();
    finish();
  }

  /// Called by a joinable before its collectives of an iteration: this rank still has inputs. Does
  /// not block unless throw_on_early_termination is set; then throws what `finish` throws on the
  /// ranks that have run out.
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
