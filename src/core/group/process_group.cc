// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/creation/backend_registry.h"
#include "core/group/group_core.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/log/log.h"
#include "core/group/call/call.h"
#include "core/group/debugging/debug_detail.h"
#include "core/group/errors.h"
#include "core/group/work/recorded_work.h"
#include "muster/collectives.h"

namespace muster {
namespace {

/// Starts a profiler range named as by torch, "native:all_reduce", with the tensors if an observer
/// needs inputs. `label` must live as long as `range`.
void begin_range(at::RecordFunction& range, std::string& label, const ProcessGroupBackend& backend,
                 Call& call) {
  label = std::string(backend.capabilities().name) + ":" + std::string(call.name());
  std::vector<c10::IValue> tensors;
  if (range.needsInputs()) {
    call.hold();
    for (const auto* side : {&call.inputs(), &call.outputs()})
      for (const auto& slice : *side) tensors.insert(tensors.end(), slice.begin(), slice.end());
  }
  range.before(std::string_view(label), &tensors);
}

/// "[0, 2]", or their number if there are many.
std::string shown_ranks(const std::vector<int>& ranks) {
  return ranks.size() <= 16 ? group::list(ranks) : std::to_string(ranks.size()) + " others";
}

}  // namespace

BackendCalls::BackendCalls(ProcessGroupBackend& backend, std::uint16_t recorded_as)
    : backend_(backend),
      uses_spans_(dynamic_cast<const SpanBackend*>(&backend) != nullptr),
      recorded_as_(recorded_as) {}

WorkRef BackendCalls::submit(Call& call) {
  call.record.recorded_group = recorded_as_;
  try {
    if (!uses_spans_) return submit_with_tensors(call);
    auto work = dispatch(call);
    call.record.on_ended();
    return work;
  } catch (const std::exception& error) {
    call.record.on_failed(error.what());
    throw;
  }
}

/// An asynchronous call is recorded as in flight until its Work has ended.
WorkRef BackendCalls::submit_with_tensors(Call& call) {
  call.hold();
  assign_number(call);
  const bool goes_on = call.is_async();
  trace::Mark mark;
  if (std::exchange(call.record.recorder, nullptr) != nullptr)
    mark = trace::Mark(call.group().parts().recorder, call.record.ticket);
  try {
    auto work = dispatch(call);
    if (work == nullptr || !goes_on) return work;
    return std::make_shared<group::RecordedWork>(std::move(work), std::move(mark));
  } catch (const std::exception& error) {
    mark.fail(error.what());
    throw;
  }
}

WorkRef BackendCalls::dispatch(Call& call) {
  return !call.is_message() && get_debug_level() == DebugLevel::DETAIL
             ? group::submit_with_details(backend_, call)
             : backend_.submit(call);
}

void BackendCalls::refuse(Call& call) {
  if (!uses_spans_) assign_number(call);
  backend_.submit(call);
}

void BackendCalls::assign_number(Call& call) {
  call.record.on_started(call.is_message() ? 0
                                           : count_.fetch_add(1, std::memory_order_relaxed) + 1);
}

std::uint64_t BackendCalls::count() const {
  return uses_spans_ ? backend_.state().collectives : count_.load(std::memory_order_relaxed);
}

ProcessGroup::ProcessGroup(std::string name, std::vector<int> ranks, int rank, std::string backend,
                           Duration timeout)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(rank),
      backend_(std::move(backend)),
      timeout_(timeout) {}

GroupCore::GroupCore(ProcessGroupParts parts)
    : ProcessGroup(std::move(parts.name), std::move(parts.ranks), parts.rank, parts.config.text(),
                   parts.timeout),
      parts_(std::move(parts)) {
  if (parts_.first_ranks.empty()) parts_.first_ranks = ranks();
  if (!is_member()) return;
  for (const auto& [device, backend] : parts_.backends) {
    if (calls_by(*backend) != nullptr) continue;
    std::uint16_t recorded_as = parts_.recorded_as;
    if (!calls_.empty() && parts_.recorder != nullptr)
      recorded_as = parts_.recorder->add_group(name() + " on " + c10::DeviceTypeName(device, true),
                                               parts_.first_ranks, rank());
    calls_.emplace_back(*backend, recorded_as);
  }
  if (parts_.backends.empty()) return;
  const auto& [device, backend] = parts_.backends.front();
  if (device == c10::DeviceType::CPU && calls_.front().uses_spans()) span_backend_ = backend.get();
}

WorkRef GroupCore::submit(Call& call) {
  // Without a profiler, this only checks the thread's list of observers.
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!call.is_valid_dense() || span_backend_ == nullptr || observers.has_value() ||
      observer_.load(std::memory_order_relaxed) != nullptr ||
      get_debug_level() == DebugLevel::DETAIL) [[unlikely]]
    return submit_slow(call, observers ? &*observers : nullptr);
  try {
    auto work = span_backend_->submit(call);
    call.record.on_ended();
    return work;
  } catch (const std::exception& error) {
    call.record.on_failed(error.what());
    throw;
  }
}

WorkRef GroupCore::submit_slow(Call& call, at::StepCallbacks* observers) {
  if (call.problem() == Problem::not_a_member) return nullptr;
  BackendCalls& calls = checked(call);
  std::string label;
  std::optional<at::RecordFunction> range;
  if (observers != nullptr) {
    range.emplace(std::move(*observers));
    begin_range(*range, label, calls.backend(), call);
  }
  CallObserver* const observer = observer_.load(std::memory_order_acquire);
  if (observer == nullptr) return calls.submit(call);
  std::uint64_t number = 0;
  call.hold();
  try {
    number = observer->on_call(call);
  } catch (...) {
    count_refused(call);
    throw;
  }
  auto work = calls.submit(call);
  observer->on_submitted(call, number, work);
  return work;
}

void GroupCore::observe(std::shared_ptr<CallObserver> observer) {
  CallObserver* none = nullptr;
  if (!registered_.compare_exchange_strong(none, observer.get()))
    group::invalid("group " + name() +
                   " has an observer already, which stays until the group ends; let that one pass "
                   "its calls on");
  owned_observer_ = std::move(observer);
  show_calls(true);
}

void GroupCore::show_calls(bool shown) { observer_.store(shown ? observer() : nullptr); }

PreparedCall GroupCore::prepare(Call call) {
  if (call.problem() == Problem::not_a_member) return {};
  const bool uses_spans = checked(call).uses_spans();
  call.hold();
  // Each run needs its own tensors if the call is asynchronous, uses a stream, or goes to a backend
  // that keeps it.
  const bool from_any = call.op() == Op::recv && call.args.root == kAnyRank;
  const auto device = call.device();
  const bool stays =
      uses_spans && !call.is_async() && !from_any && (!device || *device == c10::DeviceType::CPU);
  return {shared_from_this(), std::make_shared<Call>(std::move(call)), stays};
}

WorkRef PreparedCall::submit() {
  if (group_ == nullptr) return nullptr;
  call_->rearm();
  if (stays_) return group_->submit(*call_);
  Call again = call_->again();
  return group_->submit(again);
}

void GroupCore::refuse(Op op, std::string_view name, const std::exception& why) {
  count_refused(op, name, {});
  throw_refused(name, why);
}

void GroupCore::refuse(const Call& call, const std::exception& why) {
  count_refused(call);
  throw_refused(call.name(), why);
}

void GroupCore::count_refused(const Call& call) {
  count_refused(call.op(), call.name(), call.device());
}

/// Counted by the backend that would have carried it out, otherwise by the first.
void GroupCore::count_refused(Op op, std::string_view name, std::optional<c10::DeviceType> device) {
  if (is_message(op)) return;
  Call call(*this, op, FunctionName(name));
  call.mark_refused();
  call.record.recorder = nullptr;
  BackendCalls* const calls = device ? calls_on(*device) : nullptr;
  (calls != nullptr ? *calls : calls_.front()).refuse(call);
}

void GroupCore::throw_refused(std::string_view name, const std::exception& why) const {
  const auto text = std::string(name) + " on rank " + std::to_string(first_rank_of(rank())) +
                    " (group " + ProcessGroup::name() + "): " + why.what();
  const auto* error = dynamic_cast<const DistError*>(&why);
  const auto code = error != nullptr ? error->code() : Code::invalid_argument;
  if (dynamic_cast<const DistBackendError*>(&why) != nullptr)
    throw DistBackendError(text, code, error->ranks());
  throw DistError(text, code, error != nullptr ? error->ranks() : std::vector<int>{});
}

BackendCalls& GroupCore::checked(const Call& call) {
  try {
    if (call.problem() != Problem::none) call.explain();
    return backend_for(call);
  } catch (const std::exception& why) {
    refuse(call, why);
  }
}

BackendCalls& GroupCore::backend_for(const Call& call) {
  auto device = call.device();
  const bool has_tensors = device.has_value();
  if (!has_tensors) {  // a barrier: any backend will do, unless a device is named
    if (!call.barrier_device()) return calls_.front();
    device = call.barrier_device()->type();
  }
  BackendCalls* const calls = calls_on(*device);
  if (calls == nullptr)
    throw DistBackendError("group " + name() + " was made with backend '" + backend() +
                               "', which serves no tensors on " +
                               (has_tensors ? call.device_text() : call.barrier_device()->str()) +
                               "; name a backend for that device, or move the tensor",
                           Code::unsupported);
  const ProcessGroupBackend& chosen = calls->backend();
  std::string why;
  if (!has_tensors || chosen.supports(call.op(), call.dtype(), *device, &why)) return *calls;
  throw DistBackendError("backend '" + std::string(chosen.capabilities().name) + "' cannot do " +
                             std::string(call.name()) + ": " + why,
                         Code::unsupported);
}

at::Device GroupCore::exchange_device() const {
  const auto& entries = parts_.config.entries();
  if (entries.empty() || parts_.config.for_device(c10::DeviceType::CPU)) return at::kCPU;
  return at::Device(entries.front().first);
}

BackendCalls* GroupCore::calls_on(c10::DeviceType device) {
  for (const auto& [type, backend] : parts_.backends)
    if (type == device) return calls_by(*backend);
  return nullptr;
}

BackendCalls* GroupCore::calls_by(const ProcessGroupBackend& backend) {
  for (BackendCalls& calls : calls_)
    if (&calls.backend() == &backend) return &calls;
  return nullptr;
}

int ProcessGroup::group_rank_of(int global_rank) const {
  const auto at = std::find(ranks_.begin(), ranks_.end(), global_rank);
  if (at == ranks_.end())
    group::invalid("rank " + std::to_string(global_rank) +
                   " of the default group is not a member of group " + name_ +
                   ", whose members are " + shown_ranks(ranks_));
  return static_cast<int>(at - ranks_.begin());
}

int ProcessGroup::global_rank_of(int group_rank) const {
  if (group_rank < 0 || group_rank >= static_cast<int>(ranks_.size()))
    group::invalid("group " + name_ + " has no rank " + std::to_string(group_rank) +
                   "; its ranks are 0 to " + std::to_string(ranks_.size() - 1));
  return ranks_[static_cast<std::size_t>(group_rank)];
}

Status ProcessGroup::failure() const {
  for (const auto& [device, backend] : core_of(*this).parts().backends)
    if (auto state = backend->state(); !state.failure.ok()) return state.failure;
  return {};
}

bool GroupCore::failure_was_shown() const {
  return aborted_ ||
         std::any_of(parts_.backends.begin(), parts_.backends.end(), [](const auto& entry) {
           const auto state = entry.second->state();
           return !state.failure.ok() && state.failure_was_shown;
         });
}

ProcessGroupBackend* GroupCore::backend_of_cpu() const {
  for (const auto& [device, backend] : parts_.backends)
    if (device == c10::DeviceType::CPU) return backend.get();
  return is_member() ? parts_.backends.front().second.get() : nullptr;
}

std::shared_ptr<void> GroupCore::scope(BackendScope kind) const {
  auto* const backend = backend_of_cpu();
  return backend != nullptr ? backend->scope(kind) : nullptr;
}

bool GroupCore::shares_memory() const {
  const auto of_cpu = [](const auto& backend) { return backend.first == c10::DeviceType::CPU; };
  const auto found = std::ranges::find_if(parts_.backends, of_cpu);
  return found != parts_.backends.end() && found->second->capabilities().shares_memory;
}

std::uint64_t GroupCore::collective_count() const {
  return calls_.empty() ? 0 : calls_.front().count();
}

Status GroupCore::close() {
  const auto deadline = deadline_after(steady_clock(), timeout());
  Status first;
  std::vector<ProcessGroupBackend*> closed;  // one backend may serve several devices
  for (const auto& [device, backend] : parts_.backends) {
    if (std::find(closed.begin(), closed.end(), backend.get()) != closed.end()) continue;
    closed.push_back(backend.get());
    if (auto status = backend->close(deadline); first.ok()) first = status;
  }
  return first;
}

bool GroupCore::is_of_program(c10::DeviceType device) const {
  const auto name = parts_.config.for_device(device);
  return name && group::registered_backend(name->name()) != nullptr;
}

void GroupCore::end_calls(const std::string& reason) {
  aborted_ = true;
  for (const auto& [device, backend] : parts_.backends)
    if (!is_of_program(device)) backend->abort(reason);
}

void GroupCore::tell_of_abort(const std::string& reason) {
  for (const auto& [device, backend] : parts_.backends)
    if (is_of_program(device)) backend->abort(reason);
  if (CallObserver* const observer = this->observer()) observer->on_abort();
}

void GroupCore::abort(const std::string& reason) {
  end_calls(reason);
  tell_of_abort(reason);
}

}  // namespace muster
