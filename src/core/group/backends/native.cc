#include "core/group/backends/native.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "core/base/keep_forever.h"
#include "core/group/backends/native_work.h"
#include "core/group/call/call.h"
#include "core/group/errors.h"

namespace muster::group {
namespace {

/// The error was found before anything was sent, so other members do not know of it.
bool is_refusal(const Status& status) {
  return status.code() == Code::invalid_argument || status.code() == Code::unsupported;
}

}  // namespace

NativeBackend::NativeBackend(std::string name,
                             std::shared_ptr<collective::Communicator> communicator,
                             std::vector<int> ranks)
    : name_(std::move(name)),
      communicator_(std::move(communicator)),
      capabilities_{
          .name = name_, .scaled_sums = true, .shares_memory = communicator_->shares_memory()},
      ranks_(std::make_shared<const std::vector<int>>(std::move(ranks))) {}

bool NativeBackend::supports(Op, at::ScalarType, c10::DeviceType device, std::string* why) const {
  if (device != c10::DeviceType::Meta) return true;
  if (why != nullptr) *why = "a tensor on meta has no values";
  return false;
}

WorkRef NativeBackend::submit(BackendCall& given) {
  Call& call = static_cast<Call&>(given);  // a group makes no other
  if (call.is_refused()) [[unlikely]]
    return refuse(call);
  if (!call.is_dense()) call.stage();
  if (call.is_async() || (call.op() == Op::recv && call.args.root == transport::kAnyMember))
    return submit_async(call);
  const Status status = communicator_->run(call.args, call.record);
  if (!status.ok()) [[unlikely]]
    fail(call, status);
  call.finish();
  return nullptr;
}

/// The Work holds the call, whose memory the engine uses, until it completes.
WorkRef NativeBackend::submit_async(Call& given) {
  given.hold();
  const auto work =
      NativeWork::create(std::move(given), {communicator_, ranks_, shown_, callbacks_});
  Call& call = work->given();
  auto pending = communicator_->start(call.args, call.record, work);
  if (!call.record.started && !call.is_message()) {
    if (const auto status = pending->wait(TimePoint::max()); is_refusal(status)) fail(call, status);
  }
  call.record.on_started(0);  // if it did not start, it is recorded all the same
  const bool waits = !call.is_async();
  work->track(std::move(pending));
  if (waits) work->wait();
  return work;
}

std::shared_ptr<void> NativeBackend::manual_progress() {
  const auto& fabric = communicator_->channel().fabric();
  const auto hosts = fabric.hosts();
  const int mine = hosts[static_cast<std::size_t>(fabric.rank())];
  const auto elsewhere = [&](int member) {
    return hosts[static_cast<std::size_t>(member)] != mine;
  };
  if (std::ranges::any_of(communicator_->members(), elsewhere))
    return nullptr;  // a network needs no core of this host
  const auto here = std::count(hosts.begin(), hosts.end(), mine);
  // Each rank needs one more thread to drive calls while the others compute.
  const auto threads = here * (at::get_num_threads() + 1);
  return fabric.cores() >= threads ? nullptr : communicator_->manual_progress();
}

std::shared_ptr<void> NativeBackend::scope(BackendScope kind) {
  if (kind == BackendScope::manual_progress) return manual_progress();
  struct Stretch {
    explicit Stretch(std::shared_ptr<collective::Communicator> in)
        : communicator(std::move(in)), batch(communicator->channel().fabric()) {}
    const std::shared_ptr<collective::Communicator> communicator;  // keeps the fabric alive
    transport::SendBatch batch;
  };
  return std::make_shared<Stretch>(communicator_);
}

void NativeBackend::fail(Call& call, const Status& status) {
  if (is_refusal(status) && communicator_->failure().ok())
    call.group().refuse(call, DistError(status));
  if (communicator_->keeps_memory()) {
    call.hold();
    call.record.on_failed(status.message());
    keep_forever(std::make_shared<Call>(std::move(call)));
  }
  *shown_ = true;
  raise(status.with_context(call.name()));
}

WorkRef NativeBackend::refuse(const Call& call) {
  refused_ = true;
  communicator_->refuse(call.op());
  return nullptr;
}

BackendState NativeBackend::state() const {
  BackendState state{communicator_->failure(), shown_->load(), communicator_->sequence()};
  if (state.failure_was_shown || !refused_) return state;
  // If the other members' calls failed because of this process's refused call, it has already
  // thrown the reason.
  const int me = communicator_->members()[static_cast<std::size_t>(communicator_->rank())];
  const auto& ranks = state.failure.ranks();
  state.failure_was_shown = std::find(ranks.begin(), ranks.end(), me) != ranks.end();
  return state;
}

}  // namespace muster::group
