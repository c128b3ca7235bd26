// SPDX-License-Identifier: BSD-3-Clause
// Which replicas meet, and how they come to have the same outer state.
//
// A new replica makes, in its constructor, the calls that the others make in set_group: refusals
// are exchanged, options compared, then what each has; the members with the most meetings give, a
// part each, the outer parameters and then the outer optimizer's state to those that have others.
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <string>
#include <vector>

#include "core/base/hash.h"
#include "core/group/call/exchange.h"
#include "core/group/errors.h"
#include "muster/init.h"
#include "train/ddp/same_modules.h"
#include "train/local_sgd/alike_senders.h"
#include "train/local_sgd/replica_fragment.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

// A member gives one of these instead of its number of meetings.
constexpr std::int64_t kFresh = -2;   // it is new
constexpr std::int64_t kBroken = -1;  // without the outer optimizer's state: its source was lost

}  // namespace

/// Collective. Runs `check`, which may refuse what this member was given. If it does so on one
/// member, all throw: the others would wait for that one in their next call.
void ReplicaMeetings::refuse_together(const std::function<void()>& check) const {
  const Group& group = schedule_.group;
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
    throw DistError(schedule_.name + ": rank " + std::to_string(rank) +
                        " cannot take part, so no rank does: " + all[member],
                    Code::invalid_argument, {rank});
  }
}

/// Hashes the outer parameters and the revisions. Not the number of steps: members that failed in
/// different steps of one meeting have the same state.
std::int64_t ReplicaMeetings::hash_of_state() const {
  std::vector<std::int64_t> words{meetings_, tokens_};
  for (const Fragment& fragment : fragments_) {
    words.push_back(fragment.revision);
    const auto hashes = hashes_of(fragment);
    words.insert(words.end(), hashes.begin(), hashes.end());
  }
  return static_cast<std::int64_t>(
      hash_of({reinterpret_cast<const char*>(words.data()), words.size() * sizeof(words[0])}));
}

/// Collective. All members take the state of those with the most meetings; if their states differ,
/// of the first. A source may be lost at any moment: nothing is taken before all has arrived.
void ReplicaMeetings::share_state(bool fresh) {
  const at::NoGradGuard no_grad;
  const Group& group = schedule_.group;
  const std::int64_t met = fresh ? kFresh : lacks_optimizer_ ? kBroken : meetings_;
  auto all = at::empty({group->size(), 2}, at::kLong);
  all_gather_into_tensor(all, at::tensor({met, fresh ? 0 : hash_of_state()}, at::kLong),
                         {.group = group});
  int source = 0;
  for (int member = 1; member < group->size(); ++member)
    if (all[member][0].item<std::int64_t>() > all[source][0].item<std::int64_t>()) source = member;
  const auto given = all[source][0].item<std::int64_t>();
  const bool all_are_fresh = given == kFresh;
  sources_.clear();
  takers_.clear();
  for (int member = 0; member < group->size(); ++member) {
    const bool has_it = given != kBroken && torch::equal(all[member], all[source]);
    (member == source || has_it ? sources_ : takers_).push_back(member);
  }
  state_differs_ = given == kBroken || !takers_.empty();
  takes_state_ = std::ranges::find(takers_, group->rank()) != takers_.end();
  const bool aside = takes_state_ && !fresh;
  std::vector<at::Tensor> copies;
  if (aside)
    for (const at::Tensor& outer : outer_) copies.push_back(at::empty_like(outer));
  if (all_are_fresh)
    PackedBroadcast().send_from(group, source, outer_);
  else
    send_alike(group, sources_, takers_, aside ? copies : outer_);
  std::vector<std::int64_t> numbers{steps_, meetings_, tokens_};
  for (const Fragment& fragment : fragments_) numbers.push_back(fragment.revision);
  const auto shared = at::tensor(numbers, at::kLong);
  broadcast(shared, {.group = group, .group_src = source});
  steps_ = shared[0].item<std::int64_t>();
  meetings_ = shared[1].item<std::int64_t>();
  tokens_ = shared[2].item<std::int64_t>();
  if (takes_state_ || all_are_fresh)
    take_state(shared.narrow(0, 3, std::ssize(fragments_)), copies);
}

/// Takes the fragments that are others than this member's, which keeps its changes of the rest.
void ReplicaMeetings::take_state(const at::Tensor& revisions,
                                 const std::vector<at::Tensor>& arrived) {
  lacks_optimizer_ = shares_optimizer_;
  for (std::size_t f = 0; f < fragments_.size(); ++f) {
    Fragment& fragment = fragments_[f];
    const auto numbers = fragment.numbers();
    const auto revision = revisions[static_cast<std::int64_t>(f)].item<std::int64_t>();
    const auto is_ours = [&](std::size_t number) {
      return torch::equal(outer_[number], arrived[number]);
    };
    if (!arrived.empty() && fragment.revision == revision &&
        std::all_of(numbers.begin(), numbers.end(), is_ours))
      continue;
    fragment.revision = revision;
    fragment.tokens = 0;
    for (auto& part : fragment.parts)
      if (part.rests.defined()) part.rests.zero_();  // they have been delivered
    for (const std::size_t number : numbers) {
      if (!arrived.empty()) outer_[number].copy_(arrived[number]);
      take_outer(number, arrived.empty() ? 0 : schedule_.mix);
    }
  }
}

/// Collective, after `share_state`, once the outer optimizers have been made. A source that cannot
/// save its state tells the others so. One whose bytes differ from the first's, which their format
/// allows for the same state, sends nothing.
void ReplicaMeetings::share_optimizer(const std::function<at::Tensor()>& save,
                                      const std::function<void(const at::Tensor&)>& load) {
  shares_optimizer_ = true;
  save_ = save;
  load_ = load;
  if (schedule_.joins || !state_differs_) return;
  const Group& group = schedule_.group;
  const bool gives = !takes_state_;
  at::Tensor bytes;
  refuse_together([&] {
    if (gives) bytes = save();
  });
  auto all = at::empty({group->size(), 2}, at::kLong);
  const auto mine = gives ? at::tensor({bytes.numel(), hash_of_bits(bytes)}, at::kLong)
                          : at::zeros({2}, at::kLong);
  all_gather_into_tensor(all, mine, {.group = group});
  const at::Tensor first = all[sources_.front()];
  std::vector<int> senders;
  std::ranges::copy_if(sources_, std::back_inserter(senders),
                       [&](int member) { return torch::equal(all[member], first); });
  if (!gives) bytes = at::empty({first[0].item<std::int64_t>()}, at::kByte);
  send_alike(group, senders, takers_, {bytes});
  if (takes_state_) load(bytes);
  lacks_optimizer_ = state_differs_ = false;
}

void ReplicaMeetings::set_group(const Group& given) {
  const Group group = given ? given : default_group();
  if (!group->is_member())
    group::invalid(schedule_.name + ": this rank is not a member of the new group");
  fail_admission("set_group() was called");
  drop_admission();
  for (Fragment& fragment : fragments_) {
    settle_quietly(fragment);
    give_up(fragment);
  }
  schedule_.group = group;
  refuse_together([this] {
    for (const Fragment& fragment : fragments_)
      if (const std::int64_t changed = changed_parameter(fragment); changed >= 0)
        throw_changed(changed, get_global_rank(schedule_.group, schedule_.group->rank()));
  });
  compare();
  share_state(/*fresh=*/false);
  set_next_meeting();
}

}  // namespace muster::parallel
