#include "muster/group/backends/native.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "muster/group/backends/native_work.h"
#include "muster/group/errors.h"
#include "muster/group/validate.h"

namespace muster::group {
namespace {

/// The call holds `owner`, whose memory it works on, until it is over.
collective::PendingRef start(collective::Communicator& communicator, const Request& request,
                             const collective::Args& args, std::shared_ptr<void> owner) {
  const auto tag = static_cast<std::uint64_t>(request.tag);
  switch (request.op) {
    case Op::send:
      return communicator.send(request.peer, tag, args.inputs.front(), args.dtype, request.deadline,
                               std::move(owner));
    case Op::recv: {
      const int member = request.peer == kAnyRank ? transport::kAnyMember : request.peer;
      return communicator.receive(member, tag, args.outputs.front(), args.dtype, request.deadline,
                                  std::move(owner));
    }
    default: return communicator.start(args, request.deadline, std::move(owner));
  }
}

/// Found before anything was sent, so that nobody else knows of it.
bool refused_by_engine(const Status& status) {
  return status.code() == Code::invalid_argument || status.code() == Code::unsupported;
}

}  // namespace

/// Synchronous collectives on memory that stays where it is.
class NativeBackend::Prepared final : public PreparedCall {
 public:
  Prepared(NativeBackend& backend, Request request)
      : backend_(backend),
        request_(std::move(request)),
        staging_(request_, request_.root == backend.communicator_->rank()) {}

  WorkRef start(TimePoint deadline, std::uint64_t, trace::Mark) override {
    staging_.refill();
    if (auto status = backend_.communicator_->run(staging_.args(), deadline); !status.ok())
      backend_.fail(request_.op, request_.name, status);
    staging_.finish();
    return nullptr;
  }

 private:
  NativeBackend& backend_;
  Request request_;  // without its tensors, which the staging has
  Staging staging_;
};

NativeBackend::NativeBackend(std::string name,
                             std::shared_ptr<collective::Communicator> communicator,
                             std::vector<int> ranks)
    : name_(std::move(name)),
      communicator_(std::move(communicator)),
      ranks_(std::make_shared<const std::vector<int>>(std::move(ranks))) {}

bool NativeBackend::supports(Op, at::ScalarType, c10::DeviceType device, std::string* why) const {
  if (device != c10::DeviceType::Meta) return true;
  if (why != nullptr) *why = "a tensor on meta has no values";
  return false;
}

std::unique_ptr<PreparedCall> NativeBackend::prepare(Request request) {
  if (request.async_op || collective::is_message(request.op)) return nullptr;
  if (const auto* tensor = representative(request); tensor != nullptr && !tensor->is_cpu())
    return nullptr;  // each start has its own stream
  return std::make_unique<Prepared>(*this, std::move(request));
}

void NativeBackend::run_plain(const collective::Args& args, std::string_view name, bool valid,
                              collective::Meanwhile& meanwhile) {
  const Status status = communicator_->run(args, valid, meanwhile);
  if (status.ok()) [[likely]]
    return;
  if (!collective::is_message(args.op)) fail(args.op, name, status);
  *shown_ = true;  // a message is no call of the group's, and nobody else need be told
  raise(status.with_context(name));
}

std::shared_ptr<void> NativeBackend::drive_here() {
  const auto& fabric = communicator_->channel().fabric();
  const auto hosts = fabric.hosts();
  const int mine = hosts[static_cast<std::size_t>(fabric.rank())];
  const auto elsewhere = [&](int member) {
    return hosts[static_cast<std::size_t>(member)] != mine;
  };
  if (std::ranges::any_of(communicator_->members(), elsewhere))
    return nullptr;  // a network needs no core of this host
  const auto here = std::count(hosts.begin(), hosts.end(), mine);
  const auto threads =
      here * (at::get_num_threads() + 1);  // one more each, to drive calls while the others compute
  return fabric.cores() >= threads ? nullptr : communicator_->drive_here();
}

std::shared_ptr<void> NativeBackend::send_together() {
  struct Stretch {
    explicit Stretch(std::shared_ptr<collective::Communicator> in)
        : communicator(std::move(in)), batch(communicator->channel().fabric()) {}
    const std::shared_ptr<collective::Communicator> communicator;  // and with it the fabric
    transport::SendBatch batch;
  };
  return std::make_shared<Stretch>(communicator_);
}

bool NativeBackend::shares_memory() const {
  return collective::share_a_region(communicator_->channel().fabric(), communicator_->members());
}

void NativeBackend::fail(Op op, std::string_view name, const Status& status) {
  if (refused_by_engine(status) && communicator_->failure().ok()) {
    refuse(op);
  } else {
    *shown_ = true;
  }
  raise(status.with_context(name));
}

void NativeBackend::refuse(Op op) {
  refused_ = true;
  communicator_->refuse(op);
}

bool NativeBackend::failure_was_shown() const {
  if (*shown_) return true;
  // Where the others' calls failed because of this process's, it has thrown the reason for that
  // already.
  const auto failure = communicator_->failure();
  const int me = communicator_->members()[static_cast<std::size_t>(communicator_->rank())];
  return refused_ &&
         std::find(failure.ranks().begin(), failure.ranks().end(), me) != failure.ranks().end();
}

WorkRef NativeBackend::submit(Request request) {
  Staging staging(request, request.root == communicator_->rank());
  const bool point_to_point = collective::is_message(request.op);
  if (!request.async_op && !point_to_point) {
    if (auto status = communicator_->run(staging.args(), request.deadline); !status.ok())
      fail(request.op, request.name, status);
    staging.finish();
    return nullptr;
  }
  auto work =
      NativeWork::create(request.name, std::move(staging),
                         {communicator_, ranks_, shown_, callbacks_}, std::move(request.mark));
  auto pending = start(*communicator_, request, work->staging().args(), work);
  if (!point_to_point && pending->done())
    if (const auto status = pending->wait(TimePoint::max()); refused_by_engine(status))
      fail(request.op, request.name, status);
  work->track(std::move(pending));
  if (!request.async_op) work->wait();
  return work;
}

}  // namespace muster::group
