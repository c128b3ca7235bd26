# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.default_planner's names, which are torch's own: for its checkpoints.
`muster.checkpoint` refuses planners by name (see `muster.checkpoint.planner`).
"""

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]
