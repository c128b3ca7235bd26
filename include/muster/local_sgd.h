// SPDX-License-Identifier: BSD-3-Clause
/// Training over slow links: replicas train alone and meet every so many steps.
///
/// A replica is one rank, or several that share a model by DDP, FSDP or tensor parallelism. A
/// meeting averages over the replicas what each has changed since the last one. Each rank gives the
/// group of the ranks that hold in their replicas what it holds in its own: with a mesh of
/// (replicas, shards), that of dimension 0.
///
/// Replicas of different speed meet by the clock, and their changes count by the tokens that they
/// have seen, so that none waits for longer than a step of another.
///
/// LocalSgd takes the average as it is. DiLoCo gives it to an outer optimizer, whose parameters are
/// those of the last meeting; a meeting may also concern a fragment of the parameters, and its
/// result may arrive some steps later, while the replicas train (Streaming DiLoCo).
///
/// Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Douillard et al.,
/// "DiLoCo", arXiv:2311.08105, and "Streaming DiLoCo", arXiv:2501.18512.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/collectives.h"
#include "muster/process_group.h"

namespace muster {

struct LocalSgdOptions {
  Group group = nullptr;          ///< one member per replica; null: the default group
  std::int64_t sync_every = 100;  ///< steps from one meeting to the next
  /// Instead of sync_every, if not zero: the time from one meeting to the next, after which each
  /// replica meets at the end of its step.
  Duration sync_period = {};
  /// Weighs what a replica has changed by the tokens that it has given to step() since.
  bool by_tokens = false;
  /// How changes travel; for parameters of float32, float16 and bfloat16.
  Compression compression = Compression::none;
  /// With compression: what rounding has lost in one meeting is added in the next.
  bool error_feedback = true;
  bool joins = false;  ///< as DiLoCoOptions::joins
};

struct DiLoCoOptions {
  Group group = nullptr;
  std::int64_t sync_every = 500;  ///< steps from one meeting of a fragment to its next
  /// Instead of sync_every, if not zero: the time from one meeting of a fragment to its next,
  /// after which each replica meets at the end of its step; with a delay of 0.
  Duration sync_period = {};
  /// Weighs what a replica has changed by the tokens that it has given to step() since.
  bool by_tokens = false;
  /// Steps after which the result of a meeting is taken, fewer than sync_every. 0: at once.
  std::int64_t delay = 0;
  /// The share of a replica's own values that is kept when it takes a result: 0 up to, but not
  /// including, 1.
  double mix = 0;
  Compression compression = Compression::none;
  bool error_feedback = true;
  /// Makes the outer optimizer. Default: SGD with Nesterov momentum 0.9 and a rate of 0.7.
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> outer_optimizer =
      {};
  /// This replica is new, and those that train admit it to `group` by `admit`. The constructor
  /// returns once it has entered one of their meetings; it alone waits. If it throws, it has
  /// aborted the group.
  bool joins = false;
};

/// The module's parameters in `count` fragments of about equal work: modules that have parameters
/// of their own are dealt out by turns, so that each fragment has some of every depth.
std::vector<std::vector<at::Tensor>> fragments_of(const torch::nn::Module& module, int count);

namespace parallel {

/// The common part of LocalSgd and DiLoCo: when fragments meet, and what is sent and taken.
class ReplicaMeetings {
 public:
  struct MeetingSchedule {
    std::string name;  ///< of the class, for errors
    Group group;
    std::int64_t sync_every, delay;
    Duration sync_period;
    bool by_tokens;
    double mix;
    Compression compression;
    bool error_feedback;
    bool joins = false;
    /// Why this member cannot take part, if the caller has found a reason; then all members throw.
    std::string refusal = {};
    const Clock* clock = &steady_clock();
  };
  /// Collective, unless this member joins. Broadcasts the first member's values.
  ReplicaMeetings(std::vector<std::vector<at::Tensor>> fragments, MeetingSchedule schedule);
  ~ReplicaMeetings();
  ReplicaMeetings(const ReplicaMeetings&) = delete;
  ReplicaMeetings& operator=(const ReplicaMeetings&) = delete;
  /// Needed before the first meeting. `update` changes the outer parameters by their `grad()`,
  /// which those have that meet now.
  void set_update(std::function<void()> update) { update_ = std::move(update); }

  void step(std::int64_t tokens);
  /// As DiLoCo::set_group. Like the constructor it is to be followed by `share_optimizer` on all
  /// members, if there is an outer optimizer.
  void set_group(const Group& group);
  /// As DiLoCo::admit.
  void admit(const Group& wider);
  bool is_admitting() const { return admission_ != nullptr; }
  const Group& group() const { return schedule_.group; }
  /// After the constructor, `set_update` and `share_optimizer`: if this member joins, blocks until
  /// it has entered a meeting of the others.
  void enter();
  /// Collective. `save` gives the optimizer's state as bytes on the CPU, if this member has the
  /// newest; `load` takes it, if this member's is another. If several have it, each sends a part.
  /// Both are kept for those that join later.
  void share_optimizer(const std::function<at::Tensor()>& save,
                       const std::function<void(const at::Tensor&)>& load);
  /// From now on parameter `number` is this tensor, as large and of the same kind.
  void replace(std::size_t number, at::Tensor parameter);
  std::int64_t steps() const { return steps_; }
  std::int64_t meetings() const { return meetings_; }
  std::int64_t tokens() const { return tokens_; }
  const std::vector<at::Tensor>& outer_parameters() const { return outer_; }
  std::vector<std::pair<std::string, at::Tensor>> state_dict();
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  struct Fragment;
  struct Admission;
  void refuse_together(const std::function<void()>& check) const;
  void check() const;
  std::string described() const;
  void compare() const;
  void lay_out(const std::vector<std::vector<at::Tensor>>& fragments);
  std::int64_t hash_of_state() const;
  void share_state(bool fresh);
  void take_state(const at::Tensor& revisions, const std::vector<at::Tensor>& arrived);
  void take_outer(std::size_t number, double mix);
  void step_by_clock();
  void set_next_meeting();
  void begin(Fragment& fragment);
  void finish(Fragment& fragment);
  void weigh(Fragment& fragment);
  void update(Fragment& fragment);
  void settle(Fragment& fragment);
  void settle_quietly(Fragment& fragment);
  void give_up(Fragment& fragment);
  void send_changes(Fragment& fragment);
  std::vector<std::int64_t> hashes_of(const Fragment& fragment) const;
  std::vector<std::pair<std::string, std::int64_t>> saved_options() const;
  std::int64_t changed_parameter(const Fragment& fragment) const;
  void start_comparison(Fragment& fragment, std::int64_t changed);
  void require_same(Fragment& fragment);
  [[noreturn]] void throw_changed(std::int64_t number, int rank) const;

  // Members that train, while others join.
  std::int64_t word_for_others();
  void look_at_joiners();
  std::vector<at::Tensor> parts_for_joiners(const Fragment& fragment);
  void tell_joiners(Fragment& fragment, const std::vector<at::Tensor>& parts);
  at::Tensor header_of(std::int64_t kind, std::int64_t fragment) const;
  std::vector<at::Tensor> snapshot_messages() const;
  void take_snapshot();
  void send_snapshot();
  void send_to_joiners(std::int64_t kind, std::int64_t fragment,
                       const std::vector<at::Tensor>& body);
  void expect_answers();
  void drop_admission();
  void fail_admission(const std::string& why);
  // One that joins.
  at::Tensor receive_headers();
  void require_state_of(const at::Tensor& header) const;
  void receive_snapshot();
  bool follow_meeting();
  void answer(std::int64_t meetings);

  MeetingSchedule schedule_;
  std::function<void()> update_;
  // By number, in the order of fragments. A parameter may be given other memory at any time.
  std::vector<at::Tensor> local_, outer_;
  std::vector<at::ScalarType> dtypes_;  // of local_, as they were given
  std::vector<Fragment> fragments_;
  std::int64_t steps_ = 0, meetings_ = 0, tokens_ = 0;
  TimePoint next_{};  // meeting, by the clock
  // Of the latest `share_state`.
  std::vector<int> sources_, takers_;  // members with the newest state, and those without
  bool state_differs_ = false, takes_state_ = false;
  // Whether there is an outer optimizer; whether its state is older than the outer parameters.
  bool shares_optimizer_ = false, lacks_optimizer_ = false;
  std::function<at::Tensor()> save_;
  std::function<void(const at::Tensor&)> load_;
  std::unique_ptr<Admission> admission_;  // null: none goes on
};

}  // namespace parallel

/// Averages the parameters of all replicas every `sync_every` steps.
///
///   muster::LocalSgd local(net->parameters(), {.sync_every = 100});
///   for (auto& batch : my_share) {
///     ...
///     optimizer.step();
///     local.step();
///   }
///
/// Construction is collective: all replicas begin with the values of the group's first. All members
/// give the same parameters and options, and call step() equally often, unless they meet by the
/// clock. Not thread-safe. Throws
/// DistError on all members, with the first difference, if these differ. Buffers are not averaged.
///
/// A parameter may be given other memory (`set_data`), but not other sizes, another dtype or
/// another device: a meeting to which one comes with such a parameter changes nothing, and throws
/// on all members.
class LocalSgd {
 public:
  explicit LocalSgd(std::vector<at::Tensor> parameters, const LocalSgdOptions& options = {});
  /// After each step of the optimizer, with the tokens, or samples, that it was made of. Blocks in
  /// a meeting.
  void step(std::int64_t tokens = 1) { meetings_.step(tokens); }
  /// Those of all replicas that the meetings so far have counted, the same on every replica: by the
  /// clock, train while it is less than the budget, and all end with the same meeting.
  std::int64_t tokens() const { return meetings_.tokens(); }
  /// As DiLoCo::set_group.
  void set_group(const Group& group) { meetings_.set_group(group); }
  /// As DiLoCo::admit.
  void admit(const Group& wider) { meetings_.admit(wider); }
  bool is_admitting() const { return meetings_.is_admitting(); }
  const Group& group() const { return meetings_.group(); }
  std::int64_t steps() const { return meetings_.steps(); }
  /// Meetings so far.
  std::int64_t meetings() const { return meetings_.meetings(); }
  /// Copies of what is needed, beside the parameters and the optimizer's state, to go on.
  std::vector<std::pair<std::string, at::Tensor>> state_dict() { return meetings_.state_dict(); }
  /// Throws DistError, and leaves everything as it was, if the state is of other parameters or
  /// fragments, or of another sync_every, delay or compression.
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state) {
    meetings_.load_state_dict(state);
  }

 private:
  parallel::ReplicaMeetings meetings_;
};

/// As LocalSgd, with an outer optimizer. Fragment number f of n meets in the steps t with
/// t % sync_every == (f + 1) * sync_every / n, rounded down. With `delay` the replicas train on
/// while the values travel; a failure of the group then comes from the step that takes the result.
///
///   muster::DiLoCo diloco(muster::fragments_of(*net, 4),
///                         {.sync_every = 100, .delay = 5, .mix = 0.5,
///                          .compression = muster::Compression::int4});
///
/// All replicas have the same bits in the outer parameters, and in their own where `mix` is 0, as
/// each takes a result. Every meeting compares hashes of the outer parameters that it concerns: if
/// they differ it changes nothing, and throws a DistError on all members that names the ranks and
/// the first parameter.
class DiLoCo {
 public:
  DiLoCo(std::vector<std::vector<at::Tensor>> fragments, const DiLoCoOptions& options = {});
  explicit DiLoCo(std::vector<at::Tensor> parameters, const DiLoCoOptions& options = {})
      : DiLoCo(std::vector<std::vector<at::Tensor>>{std::move(parameters)}, options) {}
  void step(std::int64_t tokens = 1) { meetings_.step(tokens); }
  /// As LocalSgd::tokens; those that the first fragment's meetings have counted.
  std::int64_t tokens() const { return meetings_.tokens(); }
  std::int64_t steps() const { return meetings_.steps(); }
  std::int64_t meetings() const { return meetings_.meetings(); }
  /// The parameters of the outer optimizer: those of the last meetings, in the order of fragments.
  /// Those of float16 and bfloat16 are float32 here.
  const std::vector<at::Tensor>& outer_parameters() const { return meetings_.outer_parameters(); }
  /// Its state belongs into checkpoints, beside state_dict().
  torch::optim::Optimizer& outer_optimizer() { return *outer_optimizer_; }
  /// Collective over `group`, after the old one has failed, or so that replicas join or leave: from
  /// now on its members meet. Members that have met before call this; a new replica makes a DiLoCo
  /// of the group instead, with the same options. The replicas that have taken the most
  /// averages give their outer state, a part each, and the number of their step, to those that
  /// differ. Changes since the last meeting are not lost: the next one has them. A meeting that
  /// goes on is dropped. Throws as the constructor does.
  void set_group(const Group& group);
  /// Lets new replicas join while this one and the others that meet train on. All of these call it,
  /// at any of their steps; it returns at once. `wider` has the members of the group that meets and
  /// the new replicas, is made for this (not the default group), and has a timeout that is longer
  /// than the time from one meeting to the next; the new ones make a DiLoCo of it with `joins` and
  /// the same options otherwise. Each member sends a part of the outer state as it is after a
  /// meeting, and then of the averages of the meetings that follow. A new replica that has all of
  /// them takes part from the next meeting on, and `group()` is `wider` from there.
  ///
  /// No step waits for a new replica. If one is lost before, refuses what it is sent, needs longer
  /// than the timeout, or is 64 meetings behind, none of them is admitted: `wider` is aborted, and
  /// the others go on as they were, with a warning in the log. Another attempt needs another group.
  /// If the training ends first, abort `wider`: destroying it waits for all that was sent.
  /// If a member is lost, it is as without new replicas: call `set_group`, with another group too.
  /// For replicas of one rank each: those of several, whose ranks would enter at different times,
  /// join by `set_group`. With a `delay` of less than sync_every / fragments.
  void admit(const Group& wider) { meetings_.admit(wider); }
  /// Whether new replicas are on their way.
  bool is_admitting() const { return meetings_.is_admitting(); }
  /// The replicas that meet next.
  const Group& group() const { return meetings_.group(); }
  std::vector<std::pair<std::string, at::Tensor>> state_dict() { return meetings_.state_dict(); }
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state) {
    meetings_.load_state_dict(state);
  }

 private:
  void share_optimizer();

  parallel::ReplicaMeetings meetings_;
  std::unique_ptr<torch::optim::Optimizer> outer_optimizer_;
};

}  // namespace muster
