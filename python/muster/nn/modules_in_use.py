# SPDX-License-Identifier: BSD-3-Clause
"""Checks of wrappers on a module and on the results of its forward."""

import dataclasses
import sys

import torch

from muster import _C


def is_dtensor(value):
    """Whether it is a DTensor; nothing is imported for the question."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def refuse_dtensors(whom, named_parameters):
    """For what would work on the part of them that this rank has."""
    found = [name for name, each in named_parameters if is_dtensor(each)]
    if found:
        raise _C.DistArgumentError(
            f"{whom}: {', '.join(map(str, found[:3]))}{', ...' if len(found) > 3 else ''} are "
            "DTensors, which are divided already: use muster.fsdp.fully_shard with a mesh that "
            "replicates"
        )


def tensors_in(value, found):
    """Those that a loss can be made of."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            tensors_in(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            tensors_in(each, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            tensors_in(getattr(value, field.name, None), found)
    return found
