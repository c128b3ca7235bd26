# SPDX-License-Identifier: BSD-3-Clause
"""Averages of parameters over the ranks of a group."""

from collections.abc import Iterable
from typing import Any

import torch

import muster as dist

__all__ = [
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]

_MIB_TOGETHER = 25


def average_parameters(
    params: Iterable[torch.nn.Parameter], process_group: dist.ProcessGroup | None
) -> None:
    """Each parameter becomes the average of all ranks' (None: the default group), in place.
    Collective: the same parameters everywhere. Does nothing on a process that is no member.
    """
    group = dist.group.WORLD if process_group is None else process_group
    if not group:
        return
    for batch in _batches(list(params)):
        flat = torch.cat([each.detach().reshape(-1) for each in batch])
        flat /= group.size()
        dist.all_reduce(flat, group=group)
        with torch.no_grad():
            for each, part in zip(batch, flat.split([one.numel() for one in batch])):
                each.copy_(part.view_as(each))


def _batches(params: list[torch.nn.Parameter]) -> Iterable[list[torch.nn.Parameter]]:
    """Those of one type and device that travel together, in their order."""
    batch: list[torch.nn.Parameter] = []
    for each in params:
        alike = batch and (each.dtype, each.device) == (batch[0].dtype, batch[0].device)
        if batch and (
            not alike or sum(one.nbytes for one in batch) + each.nbytes > _MIB_TOGETHER << 20
        ):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def get_params_to_average(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient, of parameters or an optimizer's parameter groups. Raises
    NotImplementedError for anything else.
    """
    found: list[torch.nn.Parameter] = []
    for each in params:
        if isinstance(each, torch.nn.Parameter):
            found += [each] if each.grad is not None else []
        elif isinstance(each, dict):
            found += [one for one in each["params"] if one.grad is not None]
        else:
            raise NotImplementedError(
                "averages are taken of parameters and parameter groups, not of "
                f"{type(each).__name__}"
            )
    return found


def average_parameters_or_parameter_groups(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
    process_group: dist.ProcessGroup | None,
) -> None:
    """`average_parameters` of those that have a gradient."""
    average_parameters(get_params_to_average(params), process_group)
