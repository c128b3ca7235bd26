// SPDX-License-Identifier: BSD-3-Clause
// The state of meetings in checkpoints.
#include <torch/types.h>

#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/group/errors.h"
#include "train/local_sgd/replica_fragment.h"

namespace muster::parallel {

/// Without these a state of other options would be taken, with meetings at times that never come.
std::vector<std::pair<std::string, std::int64_t>> ReplicaMeetings::saved_options() const {
  return {{"fragments", std::ssize(fragments_)},
          {"sync_every", schedule_.sync_every},
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
  std::vector<at::Tensor> outer;
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
  fail_admission("another state has been loaded");
  for (const auto& change : changes) change();
  for (std::size_t i = 0; i < outer_.size(); ++i) outer_[i].copy_(outer[i]);
  steps_ = steps;
  meetings_ = meetings;
  tokens_ = tokens_before;
  set_next_meeting();
}

}  // namespace muster::parallel
