// SPDX-License-Identifier: BSD-3-Clause
#include "muster/point_to_point.h"

#include <map>
#include <memory>
#include <utility>

#include "core/group/call/call_builder.h"
#include "core/group/calls.h"
#include "core/group/errors.h"
#include "core/group/resolve.h"
#include "core/group/scopes.h"

namespace muster {

Call calls::send(ProcessGroup& group, const at::Tensor& tensor, const SendOptions& options,
                 const FunctionName& name, bool async_op) {
  Call call(group, Op::send, name, options.timeout, async_op);
  CallBuilder build(call);
  build.peer("dst", options.dst, options.group_dst, options.tag);
  build.add_input(tensor);
  build.check();
  return call;
}

Call calls::recv(ProcessGroup& group, const at::Tensor& tensor, const RecvOptions& options,
                 const FunctionName& name, bool async_op) {
  Call call(group, Op::recv, name, options.timeout, async_op);
  CallBuilder build(call);
  if (!options.src && !options.group_src) {
    build.tag(options.tag);
  } else {
    build.peer("src", options.src, options.group_src, options.tag);
  }
  build.add_output(tensor);
  build.keeps_versions();
  build.check();
  return call;
}

void send(const at::Tensor& tensor, const SendOptions& options) {
  static constexpr FunctionName kName = "send";
  const group::ActingGroup group(options.group, "send");
  Call call = calls::send(*group, tensor, options, kName, false);
  group->submit(call);
}

WorkRef isend(at::Tensor tensor, const SendOptions& options) {
  static constexpr FunctionName kName = "isend";
  const group::ActingGroup group(options.group, "isend");
  Call call = calls::send(*group, tensor, options, kName, true);
  return group->submit(call);
}

int recv(at::Tensor tensor, const RecvOptions& options) {
  static constexpr FunctionName kName = "recv";
  const group::ActingGroup group(options.group, "recv");
  Call call = calls::recv(*group, tensor, options, kName, false);
  const int source = call.args.root;
  const auto work = group->submit(call);
  if (work) {
    work->wait();
    return work->source_rank();
  }
  return group->is_member() ? group->global_rank_of(source) : -1;
}

WorkRef irecv(at::Tensor tensor, const RecvOptions& options) {
  static constexpr FunctionName kName = "irecv";
  const group::ActingGroup group(options.group, "irecv");
  Call call = calls::recv(*group, tensor, options, kName, true);
  return group->submit(call);
}

P2POp::P2POp(Send op, at::Tensor tensor, std::optional<int> peer, Group group, std::int64_t tag,
             std::optional<int> group_peer)
    : sends_(true),
      tensor_(std::move(tensor)),
      peer_(peer),
      group_(std::move(group)),
      tag_(tag),
      group_peer_(group_peer) {
  if (op != &isend) group::invalid("P2POp: op must be isend or irecv itself");
}
P2POp::P2POp(Recv op, at::Tensor tensor, std::optional<int> peer, Group group, std::int64_t tag,
             std::optional<int> group_peer)
    : sends_(false),
      tensor_(std::move(tensor)),
      peer_(peer),
      group_(std::move(group)),
      tag_(tag),
      group_peer_(group_peer) {
  if (op != &irecv) group::invalid("P2POp: op must be isend or irecv itself");
}

namespace {

/// Has the backends of a batch hold its messages back until all are there.
class BatchScopes {
 public:
  void open(const GroupCore& group, const at::Tensor& tensor) {
    const auto device = tensor.defined() ? tensor.device().type() : c10::DeviceType::CPU;
    // One for all groups on the CPU: they share the job's connections.
    const GroupCore* const key = device == c10::DeviceType::CPU ? nullptr : &group;
    auto& scope = scopes_[{key, device}];
    if (scope == nullptr) scope = group::scope_on(group, BackendScope::coalesce_sends, device);
  }

 private:
  std::map<std::pair<const GroupCore*, c10::DeviceType>, std::shared_ptr<void>> scopes_;
};

}  // namespace

std::vector<WorkRef> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list) {
  static constexpr FunctionName kName = "batch_isend_irecv";
  std::vector<WorkRef> works;
  BatchScopes together;
  for (const auto& op : p2p_op_list) {
    const group::ActingGroup group(op.group_, kName.text);
    if (!group->is_member()) continue;
    if (p2p_op_list.size() > 1) together.open(*group, op.tensor_);
    Call call(*group, op.sends_ ? Op::send : Op::recv, kName, {}, true);
    CallBuilder build(call);
    build.peer("peer", op.peer_, op.group_peer_, op.tag_);
    op.sends_ ? build.add_input(op.tensor_) : build.add_output(op.tensor_);
    build.keeps_versions();
    build.check();
    auto work = group->submit(call);
    if (work) works.push_back(std::move(work));
  }
  return works;
}

}  // namespace muster
