// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/backward_calls.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>

#include <exception>
#include <utility>

#include "core/group/group_core.h"
#include "core/group/work/backward_gate.h"
#include "muster/clock.h"

namespace muster::compat {
namespace {

/// The pass does not wait longer for its calls: the other ranks may be waiting for something that
/// this rank does after the pass.
constexpr Duration kStay = std::chrono::milliseconds(100);  // limit: patience

}  // namespace

std::shared_ptr<BackwardCalls> BackwardCalls::of_this_pass(const ProcessGroup& group,
                                                           Latest& latest) {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass < 0) return nullptr;
  const std::lock_guard hold(latest.mutex);
  if (auto calls = latest.calls.lock(); calls && calls->pass_ == pass) {
    const std::lock_guard lock(calls->mutex_);
    return calls->over_ ? nullptr : calls;
  }
  auto driving = core_of(group).manual_progress();
  if (!driving) return nullptr;
  auto calls = std::make_shared<BackwardCalls>(pass, std::move(driving));
  latest.calls = calls;
  // Queued before DDP's callback, which is added with the last bucket. Autograd drops it without a
  // call if an exception ends the pass.
  torch::autograd::Engine::get_default_engine().queue_callback([calls] { calls->end(); });
  return calls;
}

void BackwardCalls::finish_at_the_end(const std::vector<WorkRef>& works) {
  const std::lock_guard lock(mutex_);
  if (!over_) works_.insert(works_.end(), works.begin(), works.end());
}

/// Null where none is left; then the pass is over.
WorkRef BackwardCalls::next() {
  const std::lock_guard lock(mutex_);
  if (works_.empty()) {
    over_ = true;
    return nullptr;
  }
  auto work = std::move(works_.back());  // waiting for it drives the earlier ones too
  works_.pop_back();
  return work;
}

void BackwardCalls::end() {
  // A pass inside another (reentrant checkpoints) ends within a node of that one, which goes on.
  if (torch::autograd::get_current_node()) {
    const std::lock_guard lock(mutex_);
    over_ = true;
    works_.clear();
    driving_.reset();
    return;
  }
  group::BackwardGate::open_this_pass();
  const auto deadline = deadline_after(steady_clock(), kStay);
  while (const auto work = next()) {
    if (work->is_completed()) continue;
    try {
      work->wait(time_left(steady_clock(), deadline));
    } catch (const std::exception&) {
      // Its failure is in the future that the caller holds; a call that has not ended in time
      // continues.
    }
  }
  driving_.reset();
}

}  // namespace muster::compat
