#include "muster/group/backends/native.h"

#include <utility>

#include "muster/group/backends/native_work.h"
#include "muster/group/errors.h"

namespace muster::group {
namespace {

collective::PendingRef start(collective::Communicator& communicator, const Request& request, const collective::Args& args) {
  const auto tag = static_cast<std::uint64_t>(request.tag);
  switch (request.op) {
    case Op::send: return communicator.send(request.peer, tag, args.inputs.front(), args.dtype, request.deadline);
    case Op::recv: {
      const int member = request.peer == kAnyRank ? transport::kAnyMember : request.peer;
      return communicator.receive(member, tag, args.outputs.front(), args.dtype, request.deadline);
    }
    default: return communicator.start(args, request.deadline);
  }
}

}  // namespace

NativeBackend::NativeBackend(std::string name, std::shared_ptr<collective::Communicator> communicator, std::vector<int> ranks)
    : name_(std::move(name)), communicator_(std::move(communicator)), ranks_(std::make_shared<const std::vector<int>>(std::move(ranks))) {}

bool NativeBackend::supports(Op, at::ScalarType, c10::DeviceType device, std::string* why) const {
  if (device == c10::DeviceType::CPU) return true;
  if (why != nullptr) *why = "it moves CPU tensors only, and this one is on " + c10::DeviceTypeName(device, true);
  return false;
}

WorkRef NativeBackend::submit(Request request) {
  Staging staging(request, request.root == communicator_->rank());
  const bool point_to_point = request.op == Op::send || request.op == Op::recv;
  if (!request.async_op && !point_to_point) {
    if (auto status = communicator_->run(staging.args(), request.deadline); !status.ok()) raise(status.with_context(request.name));
    staging.finish();
    return nullptr;
  }
  auto work = std::make_shared<NativeWork>(request.name, std::move(staging), communicator_, ranks_);
  work->track(start(*communicator_, request, work->staging().args()));
  if (!request.async_op) work->wait();
  return work;
}

}  // namespace muster::group
