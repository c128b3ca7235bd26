# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.planner's names, which are torch's own: for its checkpoints, which
run on backend muster. `muster.checkpoint` has no planners and refuses the argument by name: it
works out from the state how that is divided and read.
"""

from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]
