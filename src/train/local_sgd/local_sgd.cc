// SPDX-License-Identifier: BSD-3-Clause
#include "muster/local_sgd.h"

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <map>
#include <unordered_set>

#include "core/base/hash.h"
#include "core/group/call/exchange.h"
#include "core/group/errors.h"
#include "muster/init.h"
#include "train/ddp/same_modules.h"
#include "train/modules/packed_broadcast.h"

namespace muster {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The dtype of outer parameters: changes of float16 and bfloat16 may be below their precision.
at::ScalarType outer_dtype(const at::Tensor& local) {
  return local.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

parallel::ReplicaMeetings::MeetingSchedule schedule_of(const LocalSgdOptions& options) {
  return {.name = "LocalSgd",
          .group = options.group,
          .sync_every = options.sync_every,
          .delay = 0,
          .sync_period = options.sync_period,
          .by_tokens = options.by_tokens,
          .mix = 0,
          .compression = options.compression,
          .error_feedback = options.error_feedback};
}
parallel::ReplicaMeetings::MeetingSchedule schedule_of(const DiLoCoOptions& options) {
  return {.name = "DiLoCo",
          .group = options.group,
          .sync_every = options.sync_every,
          .delay = options.delay,
          .sync_period = options.sync_period,
          .by_tokens = options.by_tokens,
          .mix = options.mix,
          .compression = options.compression,
          .error_feedback = options.error_feedback};
}

/// Collective. Runs `check`, which may refuse what this member was given. If it does so on one
/// member, all throw: the others would wait for that one in their next call.
void refuse_together(const std::string& name, const Group& group,
                     const std::function<void()>& check) {
  std::exception_ptr mine;
  std::string why;
  try {
    check();
  } catch (const std::exception& error) {
    mine = std::current_exception();
    why = error.what();
    if (why.empty()) why = "an exception without words";
  }
  std::vector<std::string> all;
  try {
    all = group::exchange_text(group, why);
  } catch (const std::exception&) {
    if (!mine) throw;
  }
  if (mine) std::rethrow_exception(mine);
  for (std::size_t member = 0; member < all.size(); ++member) {
    if (all[member].empty()) continue;
    const int rank = group->global_rank_of(static_cast<int>(member));
    throw DistError(name + ": rank " + std::to_string(rank) +
                        " cannot take part, so no rank does: " + all[member],
                    Code::invalid_argument, {rank});
  }
}

}  // namespace

std::vector<std::vector<at::Tensor>> fragments_of(const torch::nn::Module& module, int count) {
  if (count < 1) group::invalid("fragments_of: count must be at least 1");
  std::vector<Tensors> fragments(static_cast<std::size_t>(count));
  std::unordered_set<const void*> seen;
  std::size_t layers = 0;
  for (const auto& part : module.modules()) {
    Tensors own;
    for (const at::Tensor& parameter : part->parameters(/*recurse=*/false))
      if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
        own.push_back(parameter);
    if (own.empty()) continue;
    Tensors& fragment = fragments[layers++ % fragments.size()];
    fragment.insert(fragment.end(), own.begin(), own.end());
  }
  if (layers < fragments.size())
    group::invalid("fragments_of: the module has " + std::to_string(layers) +
                   " layers with parameters, which make no " + std::to_string(count) +
                   " fragments; give a smaller count");
  return fragments;
}

namespace parallel {

/// Parameters that meet together.
struct ReplicaMeetings::Fragment {
  /// Those of one dtype and device, which one call averages.
  struct MeetingPart {
    std::vector<std::size_t> numbers;
    std::int64_t elements = 0;
    at::Tensor rests;    // error feedback; undefined: none
    at::Tensor average;  // of the meeting that goes on
    WorkRef work;        // null: done
  };
  std::vector<MeetingPart> parts;
  std::int64_t offset = 0;    // it meets in steps with this remainder
  std::int64_t due = -1;      // the step that takes the average; -1: no meeting goes on
  std::int64_t revision = 0;  // meetings whose average has been taken
  std::int64_t tokens = 0;    // of this member, since it last met
  // In the meeting that goes on: of this member, and once compared of all.
  std::int64_t tokens_sent = 0, tokens_of_all = 0;
  at::Tensor digests;  // of all members' outer parameters: revision, hash, and tokens
  WorkRef comparison;  // which gathers these; null: done

  std::vector<std::size_t> numbers() const {
    std::vector<std::size_t> all;
    for (const MeetingPart& part : parts)
      all.insert(all.end(), part.numbers.begin(), part.numbers.end());
    return all;
  }
};

ReplicaMeetings::ReplicaMeetings(std::vector<Tensors> fragments, MeetingSchedule schedule)
    : schedule_(std::move(schedule)) {
  if (!schedule_.group) schedule_.group = default_group();
  if (!schedule_.group->is_member())
    group::invalid(schedule_.name + ": this rank is not a member of the group");
  refuse_together(schedule_.name, schedule_.group, [&] {
    if (!schedule_.refusal.empty()) group::invalid(schedule_.refusal);
    lay_out(fragments);
    check();
  });
  compare();
  const at::NoGradGuard no_grad;
  Tensors locals;
  for (const at::Tensor& local : local_) locals.push_back(local.detach());
  PackedBroadcast().send_from(schedule_.group, 0, locals);
  for (const at::Tensor& local : locals) {
    outer_.push_back(local.to(outer_dtype(local), /*non_blocking=*/false, /*copy=*/true));
    dtypes_.push_back(local.scalar_type());
  }
  set_next_meeting();
}

void ReplicaMeetings::replace(std::size_t number, at::Tensor parameter) {
  local_.at(number) = std::move(parameter);
}

ReplicaMeetings::~ReplicaMeetings() {
  for (Fragment& fragment : fragments_) settle_quietly(fragment);
}

/// The meeting has failed: this replica keeps its own values.
void ReplicaMeetings::give_up(Fragment& fragment) {
  fragment.due = -1;
  fragment.digests.reset();
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
    std::rethrow_exception(first);
  }
  if (fragment.digests.defined())
    fragment.tokens_of_all = fragment.digests.select(1, 2).sum().item<std::int64_t>();
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
  for (const std::size_t number : fragment.numbers()) {
    const at::Tensor outer = outer_[number].cpu().contiguous();
    hashes.push_back(static_cast<std::int64_t>(
        hash_of({static_cast<const char*>(outer.const_data_ptr()), outer.nbytes()})));
  }
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
  fragment.digests = at::empty({schedule_.group->size(), 3}, at::kLong);
  const auto mine = changed < 0
                        ? at::tensor({fragment.revision, all, fragment.tokens_sent}, at::kLong)
                        : at::tensor({kChanged, changed, fragment.tokens_sent}, at::kLong);
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
  if (!(schedule_.mix >= 0 && schedule_.mix < 1)) refuse("mix must be 0 or more and less than 1");
  if (schedule_.compression > Compression::int4)
    refuse("there is no such compression; give bf16, int8 or int4, or none");
  for (const at::Tensor& local : local_)
    if (schedule_.compression != Compression::none && local.scalar_type() == at::kDouble)
      refuse("compression is for parameters of float32, float16 and bfloat16, not of float64");
}

/// Throws on all members if their parameters or options differ.
void ReplicaMeetings::compare() const {
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
  compare_modules(schedule_.name, schedule_.group, text);
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
    settle_quietly(fragment);
    give_up(fragment);
    throw;
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

/// Takes the result. If the group has failed, the replica keeps its own values and the outer
/// parameters stay those of the last meeting.
void ReplicaMeetings::finish(Fragment& fragment) {
  fragment.due = -1;
  settle(fragment);
  require_same(fragment);
  if (const std::int64_t changed = changed_parameter(fragment); changed >= 0)
    throw_changed(changed, get_global_rank(schedule_.group, schedule_.group->rank()));
  for (auto& part : fragment.parts) {
    if (schedule_.by_tokens)  // if there are none, nothing changes
      part.average.div_(static_cast<double>(std::max<std::int64_t>(fragment.tokens_of_all, 1)));
    std::int64_t at = 0;
    for (const std::size_t number : part.numbers) {
      at::Tensor& outer = outer_[number];
      outer.mutable_grad() = part.average.narrow(0, at, outer.numel()).view(outer.sizes());
      at += outer.numel();
    }
  }
  update_();
  for (auto& part : fragment.parts) {
    for (const std::size_t number : part.numbers) {
      at::Tensor& outer = outer_[number];
      at::Tensor local = local_[number].detach();  // shares the version counter, which FSDP watches
      outer.mutable_grad().reset();
      if (schedule_.mix == 0)
        local.copy_(outer);
      else
        local.copy_(outer * (1 - schedule_.mix) + local.to(outer.scalar_type()) * schedule_.mix);
    }
    part.average.reset();
  }
  if (&fragment == &fragments_.front()) tokens_ += fragment.tokens_of_all;
  fragment.tokens -= fragment.tokens_sent;
  ++fragment.revision;
  ++meetings_;
}

/// Without these a state of other options would be taken, with meetings at times that never come.
std::vector<std::pair<std::string, std::int64_t>> ReplicaMeetings::saved_options() const {
  return {{"sync_every", schedule_.sync_every},
          {"sync_period", schedule_.sync_period.count()},
          {"by_tokens", schedule_.by_tokens ? 1 : 0},
          {"delay", schedule_.delay},
          {"compression", static_cast<std::int64_t>(schedule_.compression)}};
}

/// A meeting that goes on is part of it: its average, and the step that takes it. One that has
/// failed is not.
std::vector<std::pair<std::string, at::Tensor>> ReplicaMeetings::state_dict() {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<std::string, at::Tensor>> state;
  const auto number = [](std::int64_t value) { return at::full({}, value, at::kLong); };
  state.emplace_back("steps", number(steps_));
  state.emplace_back("meetings", number(meetings_));
  state.emplace_back("tokens", number(tokens_));
  for (const auto& [name, value] : saved_options()) state.emplace_back(name, number(value));
  for (std::size_t i = 0; i < outer_.size(); ++i)
    state.emplace_back("outer." + std::to_string(i), outer_[i].clone());
  for (std::size_t f = 0; f < fragments_.size(); ++f) {
    const std::string name = "fragment." + std::to_string(f) + ".";
    settle_quietly(fragments_[f]);
    state.emplace_back(name + "due", number(fragments_[f].due));
    state.emplace_back(name + "revision", number(fragments_[f].revision));
    state.emplace_back(name + "tokens", number(fragments_[f].tokens));
    state.emplace_back(name + "tokens_sent", number(fragments_[f].tokens_sent));
    state.emplace_back(name + "tokens_of_all", number(fragments_[f].tokens_of_all));
    for (std::size_t p = 0; p < fragments_[f].parts.size(); ++p) {
      const auto& part = fragments_[f].parts[p];
      if (part.rests.defined())
        state.emplace_back(name + "rests." + std::to_string(p), part.rests.clone());
      if (part.average.defined())
        state.emplace_back(name + "average." + std::to_string(p), part.average.clone());
    }
  }
  return state;
}

void ReplicaMeetings::load_state_dict(
    const std::vector<std::pair<std::string, at::Tensor>>& state) {
  const at::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> given(state.begin(), state.end());
  const auto refuse = [this](const std::string& what) {
    group::invalid(schedule_.name + ": the state that is to be loaded " + what +
                   "; it is of other parameters, fragments or options");
  };
  const auto taken = [&](const std::string& name, const at::IntArrayRef sizes,
                         at::ScalarType dtype) {
    const auto found = given.find(name);
    if (found == given.end() || !found->second.defined()) refuse("lacks '" + name + "'");
    if (found->second.sizes() != sizes) refuse("has other sizes for '" + name + "'");
    if (found->second.scalar_type() != dtype) refuse("has another dtype for '" + name + "'");
    return found->second;
  };
  const auto number = [&](const std::string& name) {
    return taken(name, {}, at::kLong).item<std::int64_t>();
  };
  // All is looked up before anything is changed.
  Tensors outer;
  for (std::size_t i = 0; i < outer_.size(); ++i)
    outer.push_back(
        taken("outer." + std::to_string(i), outer_[i].sizes(), outer_[i].scalar_type()));
  for (const auto& [name, value] : saved_options())
    if (const std::int64_t saved = number(name); saved != value)
      refuse("was saved with " + name + " " + std::to_string(saved) + ", and this has " +
             std::to_string(value));
  const std::int64_t steps = number("steps"), meetings = number("meetings");
  const std::int64_t tokens_before = number("tokens");
  std::vector<std::function<void()>> changes;
  for (std::size_t f = 0; f < fragments_.size(); ++f) {
    Fragment& fragment = fragments_[f];
    const std::string name = "fragment." + std::to_string(f) + ".";
    const std::int64_t due = number(name + "due"), revision = number(name + "revision");
    const std::int64_t tokens = number(name + "tokens"), sent = number(name + "tokens_sent"),
                       of_all = number(name + "tokens_of_all");
    changes.emplace_back([this, &fragment, due, revision, tokens, sent, of_all] {
      give_up(fragment);
      fragment.due = due;
      fragment.revision = revision;
      fragment.tokens = tokens;
      fragment.tokens_sent = sent;
      fragment.tokens_of_all = of_all;
    });
    for (std::size_t p = 0; p < fragment.parts.size(); ++p) {
      auto& part = fragment.parts[p];
      const auto options = outer_[part.numbers.front()].options();
      at::Tensor rests, average;
      const std::string suffix = std::to_string(p);
      if (part.rests.defined()) rests = taken(name + "rests." + suffix, part.elements, at::kFloat);
      if (due >= 0)
        average = taken(name + "average." + suffix, part.elements,
                        c10::typeMetaToScalarType(options.dtype()));
      changes.emplace_back([&part, rests, average, options] {
        if (rests.defined()) part.rests.copy_(rests);
        part.average = average.defined() ? average.to(options, false, /*copy=*/true) : average;
      });
    }
  }
  for (Fragment& fragment : fragments_) settle_quietly(fragment);
  for (const auto& change : changes) change();
  for (std::size_t i = 0; i < outer_.size(); ++i) outer_[i].copy_(outer[i]);
  steps_ = steps;
  meetings_ = meetings;
  tokens_ = tokens_before;
  set_next_meeting();
}

}  // namespace parallel

LocalSgd::LocalSgd(std::vector<at::Tensor> parameters, const LocalSgdOptions& options)
    : meetings_(std::vector<Tensors>{std::move(parameters)}, schedule_of(options)) {
  meetings_.set_update([this] {
    for (const at::Tensor& outer : meetings_.outer_parameters())
      if (outer.grad().defined()) outer.sub_(outer.grad());
  });
}

DiLoCo::DiLoCo(std::vector<std::vector<at::Tensor>> fragments, const DiLoCoOptions& options)
    : meetings_(std::move(fragments), schedule_of(options)) {
  const auto& outer = meetings_.outer_parameters();
  outer_optimizer_ = options.outer_optimizer
                         ? options.outer_optimizer(outer)
                         : std::make_unique<torch::optim::SGD>(
                               outer, torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
  meetings_.set_update([optimizer = outer_optimizer_.get()] { optimizer->step(); });
}

}  // namespace muster
