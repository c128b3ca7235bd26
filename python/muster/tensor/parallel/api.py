# SPDX-License-Identifier: BSD-3-Clause
"""`parallelize_module` over muster's meshes."""

import functools
from typing import Any

from torch.distributed.tensor.parallel import api

from muster.tensor._meshes import mesh_or_current

__all__ = ["parallelize_module"]


@functools.wraps(api.parallelize_module)
def parallelize_module(
    module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **kwargs: Any
) -> Any:
    return api.parallelize_module(module, mesh_or_current(device_mesh), parallelize_plan, **kwargs)
