# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.tensor's names over muster's groups: `from muster.tensor import
distribute_tensor, Shard`. DTensor and its placements are torch's classes.

Functions that take a device_mesh take muster's too; the mesh of a DTensor is torch's, which
`as_torch(mesh)` gives. torch.distributed.init_process_group is not needed and may be called beside.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import tensor as _torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ._meshes import as_torch, mesh_or_current

__all__ = [
    "DTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "as_torch",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
]


def _second(call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, whose second argument is a mesh."""

    @functools.wraps(call)
    def over(first: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
        return call(first, mesh_or_current(device_mesh), *args, **kwargs)

    return over


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, which takes a mesh by its name only."""

    @functools.wraps(call)
    def over(*args: Any, device_mesh: Any = None, **kwargs: Any) -> Any:
        return call(*args, device_mesh=mesh_or_current(device_mesh), **kwargs)

    return over


distribute_tensor = _second(_torch.distribute_tensor)
distribute_module = _second(_torch.distribute_module)
ones, empty, zeros = _named(_torch.ones), _named(_torch.empty), _named(_torch.zeros)
rand, randn, full = _named(_torch.rand), _named(_torch.randn), _named(_torch.full)
linspace, logspace = _named(_torch.linspace), _named(_torch.logspace)
