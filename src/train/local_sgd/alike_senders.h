// SPDX-License-Identifier: BSD-3-Clause
/// Tensors that several members hold alike, sent to those that lack them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::parallel {

/// Each sender, a rank of `group`, sends an equal part of everything to each receiver, all at once,
/// so that a slow link of one sender carries its part alone. Senders have the same bits; receivers
/// pass tensors of equal sizes and dtypes, which they may read only if this returns on them.
/// Tensors are packed, 64 MiB at a time. Other members need not call it. Blocks until this member's
/// part is done; throws DistError if a member that it waits for is lost.
void send_alike(const Group& group, const std::vector<int>& senders,
                const std::vector<int>& receivers, const std::vector<at::Tensor>& tensors,
                std::int64_t tag = 0);

/// Copies of the parts that this member, one of `senders`, sends of the tensors: they may change
/// before all has been sent.
std::vector<at::Tensor> parts_to_send(const Group& group, const std::vector<int>& senders,
                                      const std::vector<at::Tensor>& tensors);

/// Starts to send what `parts_to_send` gave. The receivers call `send_alike`, with all senders.
std::vector<WorkRef> start_sending(const Group& group, const std::vector<int>& receivers,
                                   const std::vector<at::Tensor>& parts, std::int64_t tag);

}  // namespace muster::parallel
