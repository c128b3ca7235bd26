# SPDX-License-Identifier: BSD-3-Clause
"""Checks of wrappers on a module and on the results of its forward."""

import dataclasses

import torch


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
