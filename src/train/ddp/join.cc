// SPDX-License-Identifier: BSD-3-Clause
#include "muster/join.h"

#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <string>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "muster/collectives.h"

namespace muster {
namespace {

constexpr std::int64_t kSkewWarningSteps = 1000;

/// One entry per rank, so that all ranks see which have run out.
at::Tensor flags(const Group& group, c10::Device device, bool has_inputs) {
  auto all = at::zeros({group->size()}, at::TensorOptions(at::kInt));
  if (has_inputs) all[group->rank()].fill_(1);
  return all.to(device);
}

int ones_in(const at::Tensor& active) {
  return static_cast<int>(active.sum().item<std::int64_t>());
}

}  // namespace

int JoinNotice::active_ranks() const {
  if (!active_.defined()) return 0;
  if (work_) work_->wait();
  return ones_in(active_);
}

Join::Join(std::vector<Joinable*> joinables, const Options& options)
    : joinables_(std::move(joinables)), options_(options), exceptions_(std::uncaught_exceptions()) {
  if (joinables_.empty()) group::invalid("Join needs at least one joinable");
  for (auto each = joinables_.begin(); each != joinables_.end(); ++each) {
    if (*each == nullptr) group::invalid("Join: a joinable is null");
    if (std::find(joinables_.begin(), each, *each) != each)
      group::invalid("Join: a joinable is given twice");
    if ((*each)->join_ != nullptr)
      group::invalid("Join: a joinable takes part in another Join that is not over");
    const Group theirs = (*each)->join_process_group();
    if (!theirs || !theirs->is_member())
      group::invalid("Join: this rank is not a member of a joinable's process group");
    if (!group_) group_ = theirs;
    if (theirs->ranks() != group_->ranks())
      group::invalid("Join: the joinables' process groups have different ranks: '" +
                     group_->name() + "' and '" + theirs->name() +
                     "'; make a Join for each set of ranks");
  }
  for (Joinable* joinable : joinables_) hooks_.push_back(joinable->join_hook(options_));
  if (!options_.enable) return;
  for (Joinable* joinable : joinables_) joinable->join_ = this;
}

Join::~Join() {
  const bool unfinished = joinables_.front()->join_ == this;
  leave();
  if (unfinished && std::uncaught_exceptions() == exceptions_)
    log(LogLevel::error,
        "a Join was destroyed without finish(): ranks that have run out of inputs go on waiting "
        "for this one");
}

void Join::leave() {
  for (Joinable* joinable : joinables_)
    if (joinable->join_ == this) joinable->join_ = nullptr;
}

JoinNotice Join::notify_join_context(Joinable& joinable) {
  Join* join = joinable.join_;
  return join != nullptr && join->joinables_.front() == &joinable ? join->notify() : JoinNotice();
}

JoinNotice Join::notify() {
  auto active = flags(group_, joinables_.front()->join_device(), true);
  auto work =
      all_reduce(active, {.group = group_, .async_op = !options_.throw_on_early_termination});
  if (options_.throw_on_early_termination && ones_in(active) < group_->size()) {
    leave();
    stop(active);
  }
  return {std::move(work), std::move(active)};
}

void Join::finish() {
  if (!options_.enable) return;
  if (joinables_.front()->join_ != this)
    group::invalid("Join: finish() was called before, or the Join has failed");
  // The hooks call the joinables, which must not send notices for these calls.
  leave();
  for (Joinable* joinable : joinables_) joinable->end_of_inputs();
  bool is_last = true;
  for (std::int64_t iteration = 1;; ++iteration) {
    const auto active = flags(group_, joinables_.front()->join_device(), false);
    all_reduce(active, {.group = group_});
    if (ones_in(active) == 0) break;
    is_last = false;
    shadow(active, iteration);
  }
  for (const auto& hook : hooks_) hook->post_hook(is_last);
}

void Join::shadow(const at::Tensor& active, std::int64_t iteration) {
  if (options_.throw_on_early_termination) stop(active);
  if (iteration == kSkewWarningSteps)
    log(LogLevel::warning, "Join: this rank ran out of inputs more than " +
                               std::to_string(kSkewWarningSteps) +
                               " iterations before the others; share the inputs more evenly, a "
                               "rank that only shadows does no work");
  for (const auto& hook : hooks_) hook->main_hook();
}

void Join::stop(const at::Tensor& active) const {
  const auto all = active.cpu();
  std::vector<int> out;
  std::string names;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (all[rank].item<int>() != 0) continue;
    out.push_back(group_->global_rank_of(rank));
    names += (names.empty() ? "" : ", ") + std::to_string(out.back());
  }
  throw DistError("Join: rank " + names + " has run out of inputs while " +
                      std::to_string(group_->size() - out.size()) + " of " +
                      std::to_string(group_->size()) +
                      " ranks still have some, and throw_on_early_termination is set: every rank "
                      "stops here. Give all ranks as many inputs, "
                      "or leave throw_on_early_termination out",
                  Code::mismatch, out);
}

}  // namespace muster
