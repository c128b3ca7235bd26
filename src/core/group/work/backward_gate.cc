// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/work/backward_gate.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

#include "core/tunables/tunables.h"

namespace muster::group {
namespace {

/// By autograd's id of the pass: threads of several devices may work on one pass.
struct Gates {
  std::mutex mutex;  // guards the map; no gate is locked under it
  std::unordered_map<int, std::weak_ptr<BackwardGate>> of_pass;
};
Gates& gates() {
  static auto* const all = new Gates;
  return *all;
}

/// Held by autograd until the pass ends, also by an exception.
struct Ender {
  explicit Ender(std::shared_ptr<BackwardGate> ends) : gate(std::move(ends)) {}
  Ender(const Ender&) = delete;
  Ender& operator=(const Ender&) = delete;
  ~Ender() { gate->end(); }
  const std::shared_ptr<BackwardGate> gate;
};

bool is_inside(const void* word, const c10::ivalue::Future* future) {
  return !std::less<>()(word, static_cast<const void*>(future)) &&
         std::less<>()(word, static_cast<const void*>(future + 1));
}

}  // namespace

std::shared_ptr<BackwardGate> BackwardGate::of_this_pass() {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass < 0) return nullptr;
  std::shared_ptr<BackwardGate> gate;
  bool fresh = false;
  {
    const std::lock_guard guard(gates().mutex);
    auto& known = gates().of_pass[pass];
    gate = known.lock();
    fresh = gate == nullptr;
    if (fresh) known = gate = std::make_shared<BackwardGate>(pass);
  }
  if (fresh) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [ender = std::make_shared<Ender>(gate)] {});
  }
  const std::lock_guard guard(gate->lock_);
  gate->latest_call_ = steady_clock().now();
  if (const auto thread = ThreadRest::this_thread(); thread != gate->rest_.thread())
    gate->rest_ = ThreadRest(thread);
  return gate->is_open_ ? nullptr : gate;
}

void BackwardGate::open_this_pass() {
  std::shared_ptr<BackwardGate> gate;
  {
    const std::lock_guard guard(gates().mutex);
    const auto known = gates().of_pass.find(torch::autograd::get_current_graph_task_id());
    if (known != gates().of_pass.end()) gate = known->second.lock();
  }
  if (gate) gate->open();
}

void BackwardGate::run(CallbackExecutor::Job job, const c10::ivalue::Future* future) {
  bool watch = false;
  {
    const std::lock_guard guard(lock_);
    if (outer_) return outer_->run(std::move(job), future);
    if (is_open_) return job();  // under the lock, to keep the order
    watch = held_.empty();
    held_.push_back({std::move(job), future});
  }
  if (watch) CallbackExecutor::of_process().watch(shared_from_this());
}

void BackwardGate::open() {
  std::vector<Held> held;  // destroyed after the lock is released
  const std::lock_guard guard(lock_);
  is_open_ = true;
  held.swap(held_);
  for (const auto& each : held) each.job();
}

void BackwardGate::end() {
  {
    const std::lock_guard guard(gates().mutex);
    gates().of_pass.erase(pass_);
  }
  // The enclosing pass continues on this thread.
  const bool inside = torch::autograd::get_current_graph_task_id() >= 0;
  auto outer = inside ? of_this_pass() : nullptr;
  if (!outer) return open();
  const std::lock_guard guard(lock_);
  outer_ = std::move(outer);
  for (auto& each : std::exchange(held_, {})) outer_->run(std::move(each.job), each.future);
}

Duration BackwardGate::period() const { return tunables().progress_tick; }

bool BackwardGate::look(TimePoint now) {
  bool opens = false;
  {
    const std::lock_guard guard(lock_);
    if (is_open_ || outer_) return false;
    const auto word = rest_.sleeps_on();
    const bool waits = word && std::ranges::any_of(held_, [&](const Held& each) {
                         return is_inside(*word, each.future);
                       });
    // A thread that sleeps in a call or until a given time does not wait for callbacks.
    const bool sleeps = !word || *word != nullptr;
    const auto asleep = sleeps ? tunables().backward_standstill : tunables().callback_longest;
    opens = rest_.stands_still(now, latest_call_, asleep) || waits;
  }
  if (opens) open();
  return !opens;
}

}  // namespace muster::group
