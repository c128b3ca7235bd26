// SPDX-License-Identifier: BSD-3-Clause
/// Tensors that several members hold alike, sent to those that lack them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/process_group.h"

namespace muster::parallel {

/// Each sender, a rank of `group`, sends an equal part of everything to each receiver, all at once,
/// so that a slow link of one sender carries its part alone. Senders have the same bits; receivers
/// pass tensors of equal sizes and dtypes, which they may read only if this returns on them.
/// Tensors are packed, 64 MiB at a time. Other members need not call it. Blocks until this member's
/// part is done; throws DistError if a member that it waits for is lost.
void send_alike(const Group& group, const std::vector<int>& senders,
                const std::vector<int>& receivers, const std::vector<at::Tensor>& tensors);

}  // namespace muster::parallel
