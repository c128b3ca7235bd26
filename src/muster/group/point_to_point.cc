#include "muster/group/point_to_point.h"

#include <utility>

#include "muster/group/errors.h"
#include "muster/group/plain_calls.h"
#include "muster/group/resolve.h"

namespace muster {
namespace {

WorkRef submit_send(const at::Tensor& tensor, const SendOptions& options, std::string_view name,
                    bool async_op) {
  return group::call(options.group, Op::send, name, [&](const ProcessGroup& group) {
    return Request{.inputs = {{tensor}},
                   .peer = group::group_rank(group, "dst", options.dst, options.group_dst),
                   .tag = options.tag,
                   .async_op = async_op,
                   .timeout = options.timeout};
  });
}

WorkRef submit_recv(const at::Tensor& tensor, const RecvOptions& options, std::string_view name,
                    bool async_op) {
  return group::call(options.group, Op::recv, name, [&](const ProcessGroup& group) {
    const bool any = !options.src && !options.group_src;
    return Request{
        .outputs = {{tensor}},
        .peer = any ? kAnyRank : group::group_rank(group, "src", options.src, options.group_src),
        .tag = options.tag,
        .async_op = async_op,
        .quiet = true,
        .timeout = options.timeout};
  });
}

}  // namespace

void send(const at::Tensor& tensor, const SendOptions& options) {
  if (!group::plain::send(tensor, options)) submit_send(tensor, options, "send", false);
}
WorkRef isend(at::Tensor tensor, const SendOptions& options) {
  return submit_send(tensor, options, "isend", true);
}

int recv(at::Tensor tensor, const RecvOptions& options) {
  if (const auto sender = group::plain::recv(tensor, options)) return *sender;
  const auto work = submit_recv(tensor, options, "recv", false);
  return work ? work->source_rank() : -1;
}
WorkRef irecv(at::Tensor tensor, const RecvOptions& options) {
  return submit_recv(tensor, options, "irecv", true);
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

std::vector<WorkRef> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list) {
  std::vector<WorkRef> works;
  std::shared_ptr<void> together;  // for all: the groups of a job share its connections
  for (const auto& op : p2p_op_list) {
    const auto group = group::acting(op.group_, "batch_isend_irecv");
    if (!group) continue;
    if (!together && p2p_op_list.size() > 1) together = group->send_together();
    int peer = 0;
    try {
      peer = group::group_rank(*group, "peer", op.peer_, op.group_peer_);
    } catch (const std::exception& why) {
      group->refuse(op.sends_ ? Op::send : Op::recv, "batch_isend_irecv", why);
    }
    auto work = op.sends_
                    ? submit_send(op.tensor_, {.group = group, .tag = op.tag_, .group_dst = peer},
                                  "batch_isend_irecv", true)
                    : submit_recv(op.tensor_, {.group = group, .tag = op.tag_, .group_src = peer},
                                  "batch_isend_irecv", true);
    if (work) works.push_back(std::move(work));
  }
  return works;
}

}  // namespace muster
