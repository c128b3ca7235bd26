#include "muster/group/backward_gate.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace muster::group {
namespace {

constexpr auto kStandstill = std::chrono::milliseconds(20);
constexpr auto kIdle = std::chrono::milliseconds(500);
constexpr auto kLongest = std::chrono::seconds(10);

thread_local std::weak_ptr<BackwardGate> latest;

/// Autograd's, until the pass ends: after an exception it is dropped uncalled.
struct Opener {
  explicit Opener(std::shared_ptr<BackwardGate> opens) : gate(std::move(opens)) {}
  Opener(const Opener&) = delete;
  Opener& operator=(const Opener&) = delete;
  ~Opener() { gate->open(); }
  const std::shared_ptr<BackwardGate> gate;
};

}  // namespace

std::shared_ptr<BackwardGate> BackwardGate::of_this_pass() {
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass < 0) return nullptr;
  auto gate = latest.lock();
  if (gate == nullptr || gate->pass_ != pass) {
    gate = std::make_shared<BackwardGate>(pass);
    latest = gate;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [opener = std::make_shared<Opener>(gate)] { opener->gate->open(); });
  }
  const std::lock_guard guard(gate->lock_);
  gate->latest_call_ = steady_clock().now();
  return gate->is_open_ ? nullptr : gate;
}

void BackwardGate::open_on_this_thread() {
  if (const auto gate = latest.lock()) gate->open();
}

void BackwardGate::run(CallbackExecutor::Job job) {
  bool watch = false;
  {
    const std::lock_guard guard(lock_);
    if (is_open_) return job();  // under the lock: in their order
    watch = held_.empty();
    held_.push_back(std::move(job));
  }
  if (watch) CallbackExecutor::of_process().watch(weak_from_this());
}

void BackwardGate::open() {
  std::vector<CallbackExecutor::Job> jobs;  // end after the lock
  const std::lock_guard guard(lock_);
  is_open_ = true;
  jobs.swap(held_);
  for (const auto& job : jobs) job();
}

bool BackwardGate::look(TimePoint now) {
  bool opens = false;
  {
    const std::lock_guard guard(lock_);
    if (is_open_) return false;
    const bool idle = rest_.idle_for(now) >= kIdle;
    opens = rest_.asleep_for(now) >= kStandstill || idle || now - latest_call_ >= kLongest;
  }
  if (opens) open();
  return !opens;
}

}  // namespace muster::group
