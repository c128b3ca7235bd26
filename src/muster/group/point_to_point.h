/// Messages between two ranks. `dst`, `src` and `peer` are ranks of the default group, `group_dst`
/// and `group_src` ranks of `group`.
///
/// Messages of one tag between two ranks keep their order; different tags may overtake. Sending to
/// oneself is an error. A message whose bytes or dtype are not those of the receiver's tensor
/// throws on the receiver, naming both.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/process_group.h"
#include "muster/group/work.h"

namespace muster {

struct SendOptions {
  std::optional<int> dst = {};
  Group group = nullptr;
  std::int64_t tag = 0;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// The tensor may be changed on return.
void send(const at::Tensor& tensor, const SendOptions& options);
/// None for a non-member.
WorkRef isend(at::Tensor tensor, const SendOptions& options);

struct RecvOptions {
  std::optional<int> src = {};  ///< absent, and no group_src: from any rank
  Group group = nullptr;
  std::int64_t tag = 0;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// Returns the sender's rank (of the default group); -1 for a non-member.
int recv(at::Tensor tensor, const RecvOptions& options = {});
WorkRef irecv(at::Tensor tensor, const RecvOptions& options = {});

/// One operation of a batch: `op` is `isend` or `irecv` itself.
class P2POp {
 public:
  using Send = WorkRef (*)(at::Tensor, const SendOptions&);
  using Recv = WorkRef (*)(at::Tensor, const RecvOptions&);
  /// `peer` is a rank of the default group, `group_peer` one of `group`; give one of the two.
  P2POp(Send op, at::Tensor tensor, std::optional<int> peer, Group group = nullptr,
        std::int64_t tag = 0, std::optional<int> group_peer = {});
  P2POp(Recv op, at::Tensor tensor, std::optional<int> peer, Group group = nullptr,
        std::int64_t tag = 0, std::optional<int> group_peer = {});

 private:
  friend std::vector<WorkRef> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list);
  bool sends_;
  at::Tensor tensor_;
  std::optional<int> peer_;
  Group group_;
  std::int64_t tag_;
  std::optional<int> group_peer_;
};
/// Any mix in any order that matches the peers'; never deadlocks; any subset of the ranks may call
/// it. One Work per operation, none for a non-member.
std::vector<WorkRef> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list);

}  // namespace muster
