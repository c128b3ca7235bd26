// SPDX-License-Identifier: BSD-3-Clause
// The passes of a unit: what it gathers ahead, the nodes and hooks of its graph, and backward.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <utility>

#include "core/base/log/log.h"
#include "core/group/group_core.h"
#include "train/fsdp/sharded_unit_state.h"
#include "train/modules/end_of_backward.h"

namespace muster::parallel {

/// The node in front of a forward's inputs.
struct ShardedUnit::State::Gate final : torch::autograd::Node {
  Gate(std::shared_ptr<State> state, CallRef call, torch::autograd::edge_list&& next)
      : Node(std::move(next)), state(std::move(state)), call(std::move(call)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    state->end_part(*call);
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedUnitGate"; }
  std::shared_ptr<State> state;
  CallRef call;
};

// ---- prefetch

/// Whatever is there or on its way already stays so. A hint's result is dropped if it is not used
/// in this pass.
void ShardedUnit::State::prefetch(const Units& units, bool is_hint) {
  for (const auto& each : units) {
    const auto unit = each.lock();
    if (!unit || unit.get() == this) continue;
    const std::lock_guard lock(unit->mutex);
    if (unit->failure || unit->summoned || unit->parameters.is_unsharded() ||
        unit->parameters.is_gathering())
      continue;
    unit->record(ShardedEvent::gather_started);
    unit->is_prefetched = is_hint;
    unit->parameters.start_gather(unit->options.timeline
                                      ? [unit] { unit->record(ShardedEvent::gather_finished); }
                                      : std::function<void()>());
  }
}

void ShardedUnit::State::prefetch_forward() {
  const std::size_t at = family->began.size();
  family->began.push_back(weak_from_this());
  if (forward_list) return prefetch(*forward_list, /*is_hint=*/false);
  const Units& last = family->began_before;
  if (options.forward_prefetch && at + 1 < last.size() && last[at].lock().get() == this)
    prefetch({last[at + 1]}, /*is_hint=*/true);
}

void ShardedUnit::State::prefetch_backward() {
  if (backward_list) return prefetch(*backward_list, /*is_hint=*/true);
  if (ended_at && *ended_at > 0 && *ended_at <= family->ended.size())
    prefetch({family->ended[*ended_at - 1]}, /*is_hint=*/true);
}

// ---- forward

/// Puts one node in front of all inputs, so that it is reached once.
void ShardedUnit::State::put_gate(Running& running, std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return;
  std::vector<at::Tensor*> wanting;
  torch::autograd::edge_list edges;
  for (at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    wanting.push_back(&input);
    edges.push_back(torch::autograd::impl::gradient_edge(input));
  }
  if (wanting.empty()) return;
  const NodeRef gate(std::unique_ptr<torch::autograd::Node>(
      new Gate(shared_from_this(), running.call, std::move(edges))));
  for (at::Tensor* input : wanting) {
    at::Tensor same = input->detach();
    torch::autograd::create_gradient_edge(same, gate);
    running.given.emplace_back(same, static_cast<std::int64_t>(same._version()));
    *input = same;
  }
}

void ShardedUnit::State::hook_outputs(const CallRef& call, std::span<const at::Tensor> outputs) {
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad() && !output.is_leaf())
      output.register_hook(
          [state = shared_from_this(), call](const at::Tensor&) { state->begin_part(*call); });
}

/// Gradients that arrive while the parameter is sharded would not be averaged.
void ShardedUnit::State::hook_parameters() {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad()) continue;
    parameters[i].register_hook([weak = weak_from_this(), i](const at::Tensor&) {
      const auto alive = weak.lock();
      if (!alive || (alive->parameters.is_unsharded() && alive->pass.awaits_end)) return;
      const auto check = [&] {
        if (alive->parameters.is_unsharded()) return;
        refuse_unit(
            "the gradient of '" + alive->parameters.name(i) +
            "' came while it was sharded. It was used outside of its unit's forward, or forward "
            "gave its tensors in a type that is not "
            "searched for them");
      };
      // After unshard(), the whole parameter may be used anywhere.
      alive->step_of_backward(check, [&] {
        alive->expect_end_of_pass();
        alive->pass.may_have_gradients = true;
      });
    });
  }
}

// ---- backward

/// `check` throws on every rank alike. If `step` fails, the other ranks wait for this rank, so the
/// group is aborted.
template <class Check, class Step>
void ShardedUnit::State::step_of_backward(Check check, Step step) {
  try {
    const std::lock_guard lock(mutex);
    check_failure();
    check();
    try {
      options.frame.wait_in ? options.frame.wait_in(group, step) : step();
    } catch (...) {
      failure = std::current_exception();
      fail();
      throw;
    }
  } catch (...) {
    if (options.frame.throw_as) options.frame.throw_as();
    throw;
  }
}

void ShardedUnit::State::begin_part(UnitPass& call) {
  const auto check = [this] {
    if (summoned) refuse_unit("backward while the full parameters are summoned: end that first");
    if (at::GradMode::is_enabled())
      refuse_unit(
          "backward(create_graph=true) is not there: whole parameters are gone when a graph of it "
          "would need them");
  };
  step_of_backward(check, [&] {
    expect_end_of_pass();
    const bool is_new = std::exchange(call.begun, pass.number) != pass.number;
    if (is_new) ++pass.parts;
    pass.may_have_gradients = true;
    is_prefetched = false;
    parameters.unshard(unshard_in_backward ? Gather::if_absent : Gather::never);
    if (!is_new) return;
    if (backward_list || options.backward_prefetch == BackwardPrefetch::BACKWARD_PRE)
      prefetch_backward();
    record(ShardedEvent::backward_began);
  });
}

/// A pass may end without reaching a gate.
void ShardedUnit::State::expect_end_of_pass() {
  if (std::exchange(pass.awaits_end, true)) return;
  ++family->in_backward;
  const auto self = shared_from_this();
  at_end_of_backward([self] { self->end_pass(); },
                     [self]() noexcept { self->on_broken_backward(); });
}

void ShardedUnit::State::end_part(UnitPass& call) {
  step_of_backward([] {},
                   [&] {
                     if (std::exchange(call.begun, 0) == pass.number) --pass.parts;
                     if (pass.parts == 0) end_of_part();
                   });
}

void ShardedUnit::State::end_of_part() {
  record(ShardedEvent::backward_ended);
  if (!backward_list && options.backward_prefetch == BackwardPrefetch::BACKWARD_POST)
    prefetch_backward();
  reduce_if_due();
}

void ShardedUnit::State::reduce_if_due() {
  if (parameters.is_unsharded()) parameters.collect_gradients(/*will_wait=*/!require_sync);
  if (std::exchange(pass.may_have_gradients, false)) pass.has_unreduced = true;
  if (pass.has_unreduced && require_sync) {
    pass.has_unreduced = false;
    family->finish_reduction();
    parameters.start_reduction();
    family->reducing = weak_from_this();
    // Outside of a pass nobody else would finish it.
    if (!parameters.is_reducing() || family->in_backward == 0) family->finish_reduction();
  }
  parameters.reshard(keep_after_backward ? Keep::all : Keep::nothing);
}

void ShardedUnit::State::end_pass() {
  step_of_backward([] {},
                   [this] {
                     pass.awaits_end = false;
                     ++pass.number;
                     pass.parts = 0;
                     reduce_if_due();
                     reduce_pending();
                     // A checkpoint's recomputation ends a pass of its own inside the pass.
                     if (--family->in_backward > 0) return;
                     family->finish_reduction();
                     family->drop_prefetched();
                   });
}

/// Reduces gradients that wait in units this pass has not reached.
void ShardedUnit::State::reduce_pending() {
  for (const auto& each : family->units) {
    const auto unit = each.lock();
    if (!unit) continue;
    const std::lock_guard lock(unit->mutex);
    if (unit->pass.has_unreduced && unit->require_sync && !unit->pass.awaits_end)
      unit->reduce_if_due();
  }
}

void ShardedUnit::State::on_broken_backward() noexcept {
  const std::lock_guard lock(mutex);
  if (std::exchange(pass.awaits_end, false)) --family->in_backward;
  if (failure) return;
  failure = std::make_exception_ptr(
      DistError("an exception ended backward in the middle, before all gradients were averaged",
                Code::aborted, {group->rank()}));
  fail();
}

/// Reshards even after a failure, so that the parameters can be inspected.
void ShardedUnit::State::fail() noexcept {
  try {
    const std::string text =
        "a pass of a sharded model failed on rank " + std::to_string(group->rank()) + ": " + why();
    std::vector<Group> groups;
    for (const Group& each : {group, replicas, part})
      if (each) groups.push_back(each);
    abort_groups(groups, text);
    parameters.reshard(Keep::nothing);
  } catch (const std::exception& error) {
    log(LogLevel::warning,
        std::string("the other ranks could not be told that a pass failed here: ") + error.what());
  }
}

std::string ShardedUnit::State::why() const {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

}  // namespace muster::parallel
