// SPDX-License-Identifier: BSD-3-Clause
// How replicas meet. Which do is in meeting_members.cc, their state in checkpoints in
// meeting_state.cc.
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <map>
#include <unordered_set>

#include "core/base/hash.h"
#include "core/group/errors.h"
#include "muster/init.h"
#include "train/ddp/same_modules.h"
#include "train/local_sgd/replica_admission.h"
#include "train/local_sgd/replica_fragment.h"

namespace muster::parallel {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The dtype of outer parameters: changes of float16 and bfloat16 may be below their precision.
at::ScalarType outer_dtype(const at::Tensor& local) {
  return local.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Throws the failure of one of a meeting's calls, which the user has not made, as the meeting's.
/// The class says what failed, as it does elsewhere; errors of the caller's pass as they are.
[[noreturn]] void throw_as_meetings(const std::exception_ptr& failure, const std::string& name,
                                    std::int64_t meeting) {
  const std::string what = name + ": meeting " + std::to_string(meeting) +
                           " has failed, and this replica keeps its own values: ";
  try {
    std::rethrow_exception(failure);
  } catch (const DistBackendError& error) {
    throw DistBackendError(what + error.what(), error.code(), error.ranks());
  } catch (const DistNetworkError& error) {
    throw DistNetworkError(what + error.what(), error.code(), error.ranks());
  }
}

}  // namespace

ReplicaMeetings::ReplicaMeetings(std::vector<Tensors> fragments, MeetingSchedule schedule)
    : schedule_(std::move(schedule)) {
  if (!schedule_.group) schedule_.group = default_group();
  if (!schedule_.group->is_member())
    group::invalid(schedule_.name + ": this rank is not a member of the group");
  const auto accept = [&] {
    if (!schedule_.refusal.empty()) group::invalid(schedule_.refusal);
    lay_out(fragments);
    check();
  };
  if (schedule_.joins) {
    try {
      accept();
    } catch (const std::exception& error) {
      end_admission(schedule_.group, error.what());
      throw;
    }
  } else {
    refuse_together(accept);
    compare();
  }
  const at::NoGradGuard no_grad;
  for (const at::Tensor& local : local_) {
    outer_.push_back(local.detach().to(outer_dtype(local), /*non_blocking=*/false, /*copy=*/true));
    dtypes_.push_back(local.scalar_type());
  }
  if (schedule_.joins) return;  // enter() takes the others' state
  share_state(/*fresh=*/true);
  set_next_meeting();
}

void ReplicaMeetings::replace(std::size_t number, at::Tensor parameter) {
  local_.at(number) = std::move(parameter);
}

/// The calls of a meeting that goes on do so without it, and hold the memory that they use.
ReplicaMeetings::~ReplicaMeetings() = default;

/// The meeting has failed: this replica keeps its own values.
void ReplicaMeetings::give_up(Fragment& fragment) {
  fragment.due = -1;
  fragment.digests.reset();
  fragment.words.reset();
  for (auto& part : fragment.parts) part.average.reset();
}

/// Waits for the calls of a meeting that goes on. If one has failed, so has the meeting, and
/// nothing of it is taken later.
void ReplicaMeetings::settle(Fragment& fragment) {
  std::vector<WorkRef> works{std::exchange(fragment.comparison, nullptr)};
  for (auto& part : fragment.parts) works.push_back(std::exchange(part.work, nullptr));
  std::exception_ptr first;
  for (const WorkRef& work : works) {
    if (!work) continue;
    try {
      work->wait();
    } catch (const std::exception&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) {
    give_up(fragment);
    throw_as_meetings(first, schedule_.name, meetings_ + 1);
  }
  if (!fragment.digests.defined()) return;
  fragment.tokens_of_all = fragment.digests.select(1, 2).sum().item<std::int64_t>();
  fragment.words = fragment.digests.select(1, 3);
}

/// As `settle`, but for what a failure says: the group's next call says it too.
void ReplicaMeetings::settle_quietly(Fragment& fragment) {
  try {
    settle(fragment);
  } catch (const std::exception&) {
  }
}

/// In the place of a revision: the member cannot average a parameter, whose number follows.
constexpr std::int64_t kChanged = -1;

/// One hash for each outer parameter of the fragment.
std::vector<std::int64_t> ReplicaMeetings::hashes_of(const Fragment& fragment) const {
  std::vector<std::int64_t> hashes;
  for (const std::size_t number : fragment.numbers())
    hashes.push_back(hash_of_bits(outer_[number]));
  return hashes;
}

/// The number of the fragment's first parameter that is no longer what was given; -1: none.
std::int64_t ReplicaMeetings::changed_parameter(const Fragment& fragment) const {
  for (const std::size_t number : fragment.numbers()) {
    const at::Tensor &local = local_[number], &outer = outer_[number];
    if (local.sizes() != outer.sizes() || local.scalar_type() != dtypes_[number] ||
        local.device() != outer.device())
      return static_cast<std::int64_t>(number);
  }
  return -1;
}

void ReplicaMeetings::throw_changed(std::int64_t number, int rank) const {
  throw DistError(schedule_.name + ": parameter number " + std::to_string(number) + " of rank " +
                      std::to_string(rank) +
                      " has other sizes, another dtype or another device than when it was given, "
                      "which was with sizes " +
                      c10::str(outer_[static_cast<std::size_t>(number)].sizes()) + "; make a new " +
                      schedule_.name + " of the parameters as they are",
                  Code::mismatch, {rank});
}

/// Begins to gather every member's revision of the fragment's outer parameters, and their hash. A
/// member with a changed parameter takes part, so that none waits for it, and gives its number.
void ReplicaMeetings::start_comparison(Fragment& fragment, std::int64_t changed) {
  fragment.tokens_sent = fragment.tokens;
  const auto hashes = hashes_of(fragment);
  const auto all = static_cast<std::int64_t>(
      hash_of({reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(hashes[0])}));
  const std::int64_t word = word_for_others();
  fragment.digests = at::empty({schedule_.group->size(), 4}, at::kLong);
  const auto mine =
      changed < 0 ? at::tensor({fragment.revision, all, fragment.tokens_sent, word}, at::kLong)
                  : at::tensor({kChanged, changed, fragment.tokens_sent, word}, at::kLong);
  fragment.comparison = all_gather_into_tensor(
      fragment.digests, mine, {.group = schedule_.group, .async_op = schedule_.delay > 0});
}

/// Throws on all members if their outer parameters were not the same when the meeting began: the
/// average would keep them different.
void ReplicaMeetings::require_same(Fragment& fragment) {
  if (!fragment.digests.defined()) return;
  const at::Tensor digests = std::exchange(fragment.digests, at::Tensor()).narrow(1, 0, 2);
  for (int member = 0; member < schedule_.group->size(); ++member)
    if (digests[member][0].item<std::int64_t>() == kChanged)
      throw_changed(digests[member][1].item<std::int64_t>(),
                    get_global_rank(schedule_.group, member));
  if (torch::equal(digests, digests[0].expand_as(digests))) return;
  const auto mine = hashes_of(fragment);
  auto all = at::empty({schedule_.group->size(), std::ssize(mine)}, at::kLong);
  all_gather_into_tensor(all, at::tensor(mine, at::kLong), {.group = schedule_.group});
  const auto numbers = fragment.numbers();
  std::string text = schedule_.name + ": the replicas' outer parameters differ";
  std::vector<int> ranks;
  for (int member = 1; member < schedule_.group->size(); ++member) {
    if (torch::equal(digests[member], digests[0])) continue;
    ranks.push_back(get_global_rank(schedule_.group, member));
    text += "; rank " + std::to_string(ranks.back()) + " has taken " +
            std::to_string(digests[member][0].item<std::int64_t>()) + " averages and rank " +
            std::to_string(get_global_rank(schedule_.group, 0)) + " " +
            std::to_string(digests[0][0].item<std::int64_t>());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto column = static_cast<std::int64_t>(i);
      if (torch::equal(all[member][column], all[0][column])) continue;
      text += ", and number " + std::to_string(numbers[i]) + " of sizes " +
              c10::str(outer_[numbers[i]].sizes()) + " is the first that differs";
      break;
    }
  }
  throw DistError(Status(Code::mismatch,
                         text + ". Give all replicas the state of one of them, by "
                                "load_state_dict()",
                         ranks));
}

void ReplicaMeetings::lay_out(const std::vector<Tensors>& fragments) {
  std::unordered_set<const void*> seen;
  for (std::size_t f = 0; f < fragments.size(); ++f) {
    Fragment fragment;
    fragment.offset = static_cast<std::int64_t>(f + 1) * schedule_.sync_every /
                      static_cast<std::int64_t>(fragments.size()) %
                      std::max<std::int64_t>(schedule_.sync_every, 1);
    std::map<std::pair<at::ScalarType, std::string>, Fragment::MeetingPart> parts;
    for (const at::Tensor& parameter : fragments[f]) {
      if (!parameter.defined() || !parameter.is_floating_point() ||
          parameter.layout() != at::kStrided)
        group::invalid(schedule_.name +
                       ": parameters are dense tensors of a floating-point type; leave others out");
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
        group::invalid(schedule_.name + ": a parameter is given twice, as number " +
                       std::to_string(local_.size()) + "; give each once");
      auto& part = parts[{outer_dtype(parameter), parameter.device().str()}];
      part.numbers.push_back(local_.size());
      part.elements += parameter.numel();
      local_.push_back(parameter);
    }
    for (auto& [kind, part] : parts) {
      if (schedule_.compression != Compression::none && schedule_.error_feedback &&
          kind.first == at::kFloat)
        part.rests =
            at::zeros({part.elements}, local_[part.numbers.front()].options().dtype(at::kFloat));
      fragment.parts.push_back(std::move(part));
    }
    fragments_.push_back(std::move(fragment));
  }
}

void ReplicaMeetings::check() const {
  const auto refuse = [this](const std::string& why) {
    group::invalid(schedule_.name + ": " + why);
  };
  if (local_.empty()) refuse("there are no parameters");
  if (schedule_.sync_every < 1) refuse("sync_every must be at least 1");
  if (schedule_.sync_period < Duration::zero()) refuse("sync_period must be 0, for none, or more");
  if (schedule_.sync_period > Duration::zero() && schedule_.delay > 0)
    refuse(
        "with sync_period the delay must be 0: it is counted in steps, of which replicas then make "
        "different numbers");
  if (std::ssize(fragments_) > schedule_.sync_every)
    refuse(std::to_string(fragments_.size()) + " fragments do not meet in " +
           std::to_string(schedule_.sync_every) + " steps; raise sync_every");
  if (schedule_.delay < 0 || schedule_.delay >= schedule_.sync_every)
    refuse("delay is " + std::to_string(schedule_.delay) +
           "; it must be 0 or more and less than sync_every, " +
           std::to_string(schedule_.sync_every));
  if (schedule_.joins && schedule_.group->size() < 2)
    refuse("joins is for a group that has replicas which train");
  if (schedule_.joins && schedule_.group == default_group())
    refuse(
        "the default group would fail if this replica could not join; make a group of all by "
        "new_group()");
  if (!(schedule_.mix >= 0 && schedule_.mix < 1)) refuse("mix must be 0 or more and less than 1");
  if (schedule_.compression > Compression::int4)
    refuse("there is no such compression; give bf16, int8 or int4, or none");
  for (const at::Tensor& local : local_)
    if (schedule_.compression != Compression::none && local.scalar_type() == at::kDouble)
      refuse("compression is for parameters of float32, float16 and bfloat16, not of float64");
}

/// One line for each option and parameter: what must be the same on all members.
std::string ReplicaMeetings::described() const {
  std::string text = "sync_every " + std::to_string(schedule_.sync_every) + "\nsync_period " +
                     describe(schedule_.sync_period) + "\nby_tokens " +
                     (schedule_.by_tokens ? "on" : "off") + "\ndelay " +
                     std::to_string(schedule_.delay) + "\nmix " + std::to_string(schedule_.mix) +
                     "\ncompression " + std::to_string(static_cast<int>(schedule_.compression)) +
                     "\nerror_feedback " + (schedule_.error_feedback ? "on\n" : "off\n");
  for (const Fragment& fragment : fragments_)
    for (const auto& part : fragment.parts)
      for (const std::size_t number : part.numbers)
        text += "parameter " + std::to_string(number) + " of fragment " +
                std::to_string(&fragment - fragments_.data()) + " " +
                c10::str(local_[number].sizes()) + " " +
                c10::toString(local_[number].scalar_type()) + "\n";
  return text;
}

/// Throws on all members if their parameters or options differ.
void ReplicaMeetings::compare() const {
  compare_modules(schedule_.name, schedule_.group, described());
}

void ReplicaMeetings::set_next_meeting() {
  const auto turns = static_cast<Duration::rep>(fragments_.size());
  next_ = deadline_after(*schedule_.clock, schedule_.sync_period / turns);
}

/// Fragments meet in turn. All members leave a meeting at about the same time, so they begin the
/// next one within a step of each other, and its number alone says which fragment meets.
void ReplicaMeetings::step_by_clock() {
  if (schedule_.clock->now() < next_) return;
  Fragment& fragment = fragments_[static_cast<std::size_t>(meetings_) % fragments_.size()];
  begin(fragment);
  finish(fragment);
  set_next_meeting();
}

void ReplicaMeetings::step(std::int64_t tokens) {
  if (tokens < 0)
    group::invalid(schedule_.name + ": step() was given " + std::to_string(tokens) +
                   " tokens; give 0 or more");
  const at::NoGradGuard no_grad;
  look_at_joiners();
  ++steps_;
  for (Fragment& fragment : fragments_) fragment.tokens += tokens;
  if (schedule_.sync_period > Duration::zero()) return step_by_clock();
  for (Fragment& fragment : fragments_)
    if (fragment.due == steps_) finish(fragment);
  for (Fragment& fragment : fragments_) {
    if (steps_ % schedule_.sync_every != fragment.offset) continue;
    begin(fragment);
    if (schedule_.delay == 0) finish(fragment);
  }
}

/// Sends what this replica has changed since the fragment's last meeting. The outer optimizer takes
/// the average for a gradient, so it is the last value minus the current one.
void ReplicaMeetings::begin(Fragment& fragment) {
  try {
    send_changes(fragment);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    settle_quietly(fragment);
    give_up(fragment);
    // The meetings on their way end before this one.
    const auto others =
        std::ranges::count_if(fragments_, [](const Fragment& each) { return each.due >= 0; });
    throw_as_meetings(failure, schedule_.name, meetings_ + others + 1);
  }
  fragment.due = steps_ + schedule_.delay;
}

void ReplicaMeetings::send_changes(Fragment& fragment) {
  const std::int64_t changed = changed_parameter(fragment);
  start_comparison(fragment, changed);
  for (auto& part : fragment.parts) {
    part.average = at::empty({part.elements}, outer_[part.numbers.front()].options());
    if (changed >= 0) part.average.zero_();  // no member takes it
    std::int64_t at = 0;
    for (const std::size_t number : part.numbers) {
      if (changed >= 0) break;
      const at::Tensor& outer = outer_[number];
      at::Tensor change = part.average.narrow(0, at, outer.numel()).view(outer.sizes());
      at::sub_out(change, outer, local_[number].detach().to(outer.scalar_type()));
      at += outer.numel();
    }
    // The sum is divided once the tokens of all are known.
    if (schedule_.by_tokens) part.average.mul_(static_cast<double>(fragment.tokens_sent));
    AllReduceOptions options{.op = schedule_.by_tokens ? ReduceOp::SUM : ReduceOp::AVG,
                             .group = schedule_.group,
                             .async_op = schedule_.delay > 0};
    if (part.average.scalar_type() == at::kFloat) options.compression = schedule_.compression;
    if (part.rests.defined()) options.feedback = part.rests;
    part.work = all_reduce(part.average, options);
  }
}

/// `mix`: the share of its own values that this replica keeps.
void ReplicaMeetings::take_outer(std::size_t number, double mix) {
  const at::Tensor& outer = outer_[number];
  at::Tensor local = local_[number].detach();  // shares the version counter, which FSDP watches
  if (mix == 0)
    local.copy_(outer);
  else
    local.copy_(outer * (1 - mix) + local.to(outer.scalar_type()) * mix);
}

/// Takes the result. If that cannot be, the replica keeps its own values and the outer parameters
/// stay those of the last meeting.
void ReplicaMeetings::finish(Fragment& fragment) {
  fragment.due = -1;
  std::vector<at::Tensor> for_joiners;
  try {
    settle(fragment);
    require_same(fragment);
    if (const std::int64_t changed = changed_parameter(fragment); changed >= 0)
      throw_changed(changed, get_global_rank(schedule_.group, schedule_.group->rank()));
    weigh(fragment);
    for_joiners = parts_for_joiners(fragment);  // the optimizer may write into its gradients
    update(fragment);
  } catch (...) {
    give_up(fragment);
    fail_admission("a meeting has failed");
    throw;
  }
  for (auto& part : fragment.parts) {
    for (const std::size_t number : part.numbers) take_outer(number, schedule_.mix);
    part.average.reset();
  }
  if (&fragment == &fragments_.front()) tokens_ += fragment.tokens_of_all;
  fragment.tokens -= fragment.tokens_sent;
  ++fragment.revision;
  ++meetings_;
  if (admission_) tell_joiners(fragment, for_joiners);
}

/// Makes averages of sums that were weighed by tokens. If there are none, nothing changes.
void ReplicaMeetings::weigh(Fragment& fragment) {
  if (!schedule_.by_tokens) return;
  for (auto& part : fragment.parts)
    part.average.div_(static_cast<double>(std::max<std::int64_t>(fragment.tokens_of_all, 1)));
}

/// Runs the outer optimizer with the averages.
void ReplicaMeetings::update(Fragment& fragment) {
  for (auto& part : fragment.parts) {
    std::int64_t at = 0;
    for (const std::size_t number : part.numbers) {
      at::Tensor& outer = outer_[number];
      outer.mutable_grad() = part.average.narrow(0, at, outer.numel()).view(outer.sizes());
      at += outer.numel();
    }
  }
  const auto drop_gradients = [&] {  // the next update is of another fragment
    for (const std::size_t number : fragment.numbers()) outer_[number].mutable_grad().reset();
  };
  try {
    update_();
  } catch (...) {
    drop_gradients();
    throw;
  }
  drop_gradients();
}

}  // namespace muster::parallel
