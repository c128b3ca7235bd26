# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of sharded models."""

import torch

from muster import _C

from . import units


def clip_grad_norm_(model, max_norm, norm_type=2.0):
    """Collective: the norm of all gradients over all ranks, which are multiplied so that it is at
    most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does for a model that is whole on each
    rank. Returns the norm before that. norm_type: inf or positive.
    """
    whole = [
        each.grad
        for each in model.parameters()
        if each.grad is not None and not _C._is_sharded(each)
    ]
    return torch.tensor(
        _C._clip_grad_norm(units.units_in(model), whole, float(max_norm), float(norm_type))
    )
