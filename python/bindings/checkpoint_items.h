// SPDX-License-Identifier: BSD-3-Clause
/// Python's _CheckpointItems: this rank's parts of tensors, as muster.checkpoint has them.
#pragma once

#include <vector>

#include "checkpoint/modules/items.h"

namespace muster::python {

/// Created before the ranks communicate. If a rank's arguments are invalid, the error is kept until
/// the others can be told.
struct Items {
  std::vector<checkpoint::CheckpointItem> all;
};

}  // namespace muster::python
