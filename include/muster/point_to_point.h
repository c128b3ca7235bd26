// SPDX-License-Identifier: BSD-3-Clause
/// Messages between two ranks. `dst`, `src` and `peer` are ranks of the default group; `group_dst`,
/// `group_src` and `group_peer` are ranks of `group`.
///
/// Messages between two ranks with the same tag arrive in order; messages with different tags may
/// overtake each other. Sending to oneself is an error. If a message's size or dtype differs from
/// the receiver's tensor, the receiver throws an error that names both.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "muster/clock.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster {

struct SendOptions {
  std::optional<int> dst = {};
  Group group = nullptr;
  std::int64_t tag = 0;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// Blocks until the tensor may be modified.
void send(const at::Tensor& tensor, const SendOptions& options);
/// Returns null on a non-member. The tensor must not be modified until the Work has completed.
WorkRef isend(at::Tensor tensor, const SendOptions& options);

struct RecvOptions {
  std::optional<int> src = {};  ///< default without group_src: any rank
  Group group = nullptr;
  std::int64_t tag = 0;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// Returns the sender's rank in the default group; -1 on a non-member.
int recv(at::Tensor tensor, const RecvOptions& options = {});
/// Returns null on a non-member. The tensor must not be used until the Work has completed.
WorkRef irecv(at::Tensor tensor, const RecvOptions& options = {});

/// One operation of a batch: `op` is `isend` or `irecv` itself.
class P2POp {
 public:
  using Send = WorkRef (*)(at::Tensor, const SendOptions&);
  using Recv = WorkRef (*)(at::Tensor, const RecvOptions&);
  /// Give either `peer`, a rank of the default group, or `group_peer`, a rank of `group`.
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
/// Starts any mix of sends and receives whose order matches the peers'. Never deadlocks; any subset
/// of the ranks may call it. Returns one Work per operation, none for operations on groups this
/// process is not a member of.
std::vector<WorkRef> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list);

}  // namespace muster
