#include "muster/group/process_group.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "muster/base/debug_level.h"
#include "muster/base/log.h"
#include "muster/base/quick_clock.h"
#include "muster/collective/communicator.h"
#include "muster/group/detail.h"
#include "muster/group/errors.h"
#include "muster/group/rank_list.h"
#include "muster/group/recording.h"
#include "muster/group/validate.h"

namespace muster {
namespace {

class Resubmitted final : public PreparedCall {
 public:
  Resubmitted(ProcessGroupBackend& backend, Request request)
      : backend_(backend), request_(std::move(request)) {}
  WorkRef start(TimePoint deadline, std::uint64_t sequence, trace::Mark mark) override {
    Request request = request_;
    request.mark = std::move(mark);
    request.deadline = deadline;
    request.sequence = sequence;
    return backend_.submit(std::move(request));
  }

 private:
  ProcessGroupBackend& backend_;
  const Request request_;
};

// Profilers that want to see the call which this thread makes, as `run_plain` found them. Asked
// twice, those that look at a part of all calls only would answer for two.
thread_local std::optional<at::StepCallbacks> drawn_observers;

/// "native:all_reduce", torch's way to name them, with the tensors where an observer wants inputs.
/// `label` lives as long as `range`.
void begin_range(at::RecordFunction& range, std::string& label, const ProcessGroupBackend& backend,
                 const Request& request) {
  label = std::string(backend.name()) + ":" + std::string(request.name);
  std::vector<c10::IValue> tensors;
  if (range.needsInputs()) {
    for (const auto* side : {&request.inputs, &request.outputs})
      for (const auto& slice : *side) tensors.insert(tensors.end(), slice.begin(), slice.end());
  }
  range.before(std::string_view(label), &tensors);
}

/// "[0, 2]", or how many they are.
std::string shown_ranks(const std::vector<int>& ranks) {
  return ranks.size() <= 16 ? group::list(ranks) : std::to_string(ranks.size()) + " others";
}

}  // namespace

ProcessGroup::ProcessGroup(ProcessGroupParts parts)
    : parts_(std::move(parts)), timeout_(parts_.timeout) {
  if (parts_.first_ranks.empty()) parts_.first_ranks = parts_.ranks;
  if (!is_member() || parts_.backends.empty()) return;
  const auto& [device, backend] = parts_.backends.front();
  if (device == c10::DeviceType::CPU && backend->takes_plain()) plain_ = backend.get();
}

inline std::uint64_t ProcessGroup::next_number() {
  if (!counting_.enter()) {
    counting_.revoke();
    return collectives_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  const std::uint64_t number = collectives_.load(std::memory_order_relaxed) + 1;
  collectives_.store(number, std::memory_order_relaxed);
  counting_.leave();
  return number;
}

WorkRef ProcessGroup::submit(Request request) {
  if (!is_member()) return nullptr;
  auto& backend = checked(request);
  arm(request);
  return observed(backend, request, [&] { return backend.submit(std::move(request)); });
}

bool ProcessGroup::takes_plain() const {
  return plain_ != nullptr && get_debug_level() != DebugLevel::DETAIL;
}

inline ProcessGroup::Armed ProcessGroup::arm(std::string_view name, bool collective,
                                             const std::optional<Duration>* given) {
  Armed armed;
  if (collective) armed.sequence = next_number();
  armed.begun = quick_now();
  const Duration timeout = given != nullptr && *given ? **given : this->timeout();
  const bool unlimited = timeout < Duration::zero() || timeout >= TimePoint::max() - armed.begun;
  armed.deadline = unlimited ? TimePoint::max() : armed.begun + timeout;
  if (logs(LogLevel::trace)) [[unlikely]]
    log(LogLevel::trace, "group " + parts_.name + ": " + std::string(name) +
                             (collective ? " #" + std::to_string(armed.sequence) : ""));
  return armed;
}

/// Numbers, logs, arms and records a plain call.
class ProcessGroup::PlainEntry final : public collective::Meanwhile {
 public:
  PlainEntry(ProcessGroup& group, const PlainCall& call)
      : group_(group), recorder_(group.parts_.recorder.get()), call_(call) {}

  TimePoint begun() noexcept override {
    entered_ = true;
    const Armed armed = group_.arm(call_.name, !call_.message, call_.timeout);
    since_ = armed.begun;
    if (recorder_ != nullptr) {
      recorder_->begin(group_.parts_.recorded_as,
                       {.name = *call_.recorded,
                        .sequence = armed.sequence,
                        .bytes = call_.bytes,
                        .dtype = call_.dtype,
                        .shape = call_.shape,
                        .peer = call_.peer,
                        .tag = call_.tag},
                       armed.begun, ticket_);
    }
    return armed.deadline;
  }
  TimePoint since() const noexcept override { return since_; }
  void ended() {
    if (recorder_ != nullptr) recorder_->end(ticket_, at_once ? since_ : quick_now());
  }
  void failed(std::string_view why) {
    if (!entered_) begun();  // refused before it began; it counts all the same
    if (recorder_ != nullptr) recorder_->fail(ticket_, why, steady_clock().now());
  }

 private:
  ProcessGroup& group_;
  trace::Recorder* const recorder_;
  const PlainCall& call_;
  trace::Ticket ticket_;
  TimePoint since_;
  bool entered_ = false;
};

bool ProcessGroup::run_plain(const collective::Args& args, const PlainCall& call) {
  if (auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) [[unlikely]] {
    drawn_observers = std::move(observers);
    return false;
  }
  PlainEntry entry(*this, call);
  try {
    plain_->run_plain(args, call.name, call.valid, entry);
    entry.ended();
    return true;
  } catch (const std::exception& error) {
    entry.failed(error.what());
    throw;
  }
}

/// `start` starts the armed call, which profilers and the flight recorder are told of. An
/// asynchronous one is over when its mark says so.
template <class Start>
WorkRef ProcessGroup::observed(ProcessGroupBackend& backend, Request& request, Start start) {
  // A range for torch's profilers; where none runs this is one look at a thread's list of
  // observers.
  std::string label;
  std::optional<at::RecordFunction> range;
  auto observers = drawn_observers ? std::exchange(drawn_observers, {})
                                   : at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (observers) [[unlikely]] {
    range.emplace(std::move(*observers));
    begin_range(*range, label, backend, request);
  }
  if (!parts_.recorder) return carry_out(backend, request, start);
  auto& recorder = *parts_.recorder;
  const bool later = request.async_op;
  const auto ticket = recorder.begin(parts_.recorded_as,
                                     group::call_of(request, parts_.first_ranks), request.begun);
  try {
    if (later) request.mark = trace::Mark(parts_.recorder, ticket);
    auto work = carry_out(backend, request, start);
    if (!later) recorder.end(ticket, steady_clock().now());
    return work;
  } catch (const std::exception& error) {
    recorder.fail(ticket, error.what(), steady_clock().now());
    throw;
  }
}

template <class Start>
WorkRef ProcessGroup::carry_out(ProcessGroupBackend& backend, Request& request, Start start) {
  if (collective::is_message(request.op) || get_debug_level() != DebugLevel::DETAIL) return start();
  Request detailed = request;
  detailed.mark = std::move(request.mark);
  return group::submit_in_detail(*this, backend, std::move(detailed));
}

PreparedRequest ProcessGroup::prepare(Request request) {
  PreparedRequest prepared;
  if (!is_member()) return prepared;
  auto& backend = checked(request);
  prepared.request_ = request;
  prepared.call_ = backend.prepare(request);
  if (prepared.call_ == nullptr)
    prepared.call_ = std::make_unique<Resubmitted>(backend, std::move(request));
  prepared.group_ = shared_from_this();
  prepared.backend_ = &backend;
  return prepared;
}

WorkRef PreparedRequest::start() {
  if (group_ == nullptr) return nullptr;
  group_->arm(request_);
  return group_->observed(*backend_, request_, [this] {
    return call_->start(request_.deadline, request_.sequence, std::move(request_.mark));
  });
}

ProcessGroupBackend& ProcessGroup::checked(const Request& request) {
  try {
    group::validate(request, rank(), size());
    return backend_for(request);
  } catch (const std::exception& why) {
    refuse(request.op, request.name, why);
  }
}

void ProcessGroup::refuse(Op op, std::string_view name, const std::exception& why) {
  drawn_observers.reset();
  if (!collective::is_message(op)) {
    next_number();
    parts_.backends.front().second->refuse(op);
  }
  const auto text = std::string(name) + " on rank " + std::to_string(first_rank_of(rank())) +
                    " (group " + parts_.name + "): " + why.what();
  const auto* error = dynamic_cast<const DistError*>(&why);
  const auto code = error != nullptr ? error->code() : Code::invalid_argument;
  if (dynamic_cast<const DistBackendError*>(&why) != nullptr)
    throw DistBackendError(text, code, error->ranks());
  throw DistError(text, code, error != nullptr ? error->ranks() : std::vector<int>{});
}

void ProcessGroup::arm(Request& request) {
  const Armed armed = arm(request.name, !collective::is_message(request.op), &request.timeout);
  request.sequence = armed.sequence;
  request.begun = armed.begun;
  request.deadline = armed.deadline;
}

ProcessGroupBackend& ProcessGroup::backend_for(const Request& request) const {
  const auto* tensor = group::representative(request);
  if (tensor == nullptr) return *parts_.backends.front().second;  // a barrier: any of them will do
  const auto device = tensor->device().type();
  for (const auto& [type, backend] : parts_.backends) {
    if (type != device) continue;
    std::string why;
    if (backend->supports(request.op, tensor->scalar_type(), device, &why)) return *backend;
    throw DistBackendError("backend '" + std::string(backend->name()) + "' cannot do " +
                               std::string(request.name) + ": " + why,
                           Code::unsupported);
  }
  throw DistBackendError("group " + parts_.name + " was made with backend '" + backend() +
                             "', which serves no tensors on " + tensor->device().str() +
                             "; name a backend for that device, or move the tensor",
                         Code::unsupported);
}

int ProcessGroup::group_rank_of(int global_rank) const {
  const auto at = std::find(parts_.ranks.begin(), parts_.ranks.end(), global_rank);
  if (at == parts_.ranks.end())
    group::invalid("rank " + std::to_string(global_rank) +
                   " of the default group is not a member of group " + parts_.name +
                   ", whose members are " + shown_ranks(parts_.ranks));
  return static_cast<int>(at - parts_.ranks.begin());
}

int ProcessGroup::global_rank_of(int group_rank) const {
  if (group_rank < 0 || group_rank >= static_cast<int>(parts_.ranks.size()))
    group::invalid("group " + parts_.name + " has no rank " + std::to_string(group_rank) +
                   "; its ranks are 0 to " + std::to_string(parts_.ranks.size() - 1));
  return parts_.ranks[static_cast<std::size_t>(group_rank)];
}

Status ProcessGroup::failure() const {
  for (const auto& [device, backend] : parts_.backends)
    if (auto status = backend->failure(); !status.ok()) return status;
  return {};
}

bool ProcessGroup::failure_was_shown() const {
  return aborted_ ||
         std::any_of(parts_.backends.begin(), parts_.backends.end(), [](const auto& entry) {
           return !entry.second->failure().ok() && entry.second->failure_was_shown();
         });
}

ProcessGroupBackend* ProcessGroup::backend_of_cpu() const {
  for (const auto& [device, backend] : parts_.backends)
    if (device == c10::DeviceType::CPU) return backend.get();
  return is_member() ? parts_.backends.front().second.get() : nullptr;
}

std::shared_ptr<void> ProcessGroup::drive_here() const {
  auto* const backend = backend_of_cpu();
  return backend != nullptr ? backend->drive_here() : nullptr;
}

std::shared_ptr<void> ProcessGroup::send_together() const {
  auto* const backend = backend_of_cpu();
  return backend != nullptr ? backend->send_together() : nullptr;
}

bool ProcessGroup::shares_memory() const {
  const auto of_cpu = [](const auto& backend) { return backend.first == c10::DeviceType::CPU; };
  const auto found = std::ranges::find_if(parts_.backends, of_cpu);
  return found != parts_.backends.end() && found->second->shares_memory();
}

Status ProcessGroup::close() {
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

void ProcessGroup::abort(const std::string& reason) {
  aborted_ = true;
  for (const auto& [device, backend] : parts_.backends) backend->abort(reason);
}

}  // namespace muster
