# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of sharded models."""

import contextlib
import functools

import torch

from muster import _C
from muster.nn.modules_in_use import is_dtensor

from . import units


def clip_grad_norm_(model, max_norm, norm_type=2.0):
    """Collective: the norm of all gradients over all ranks, which are multiplied so that it is at
    most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does for a model that is whole on each
    rank. Returns the norm before that, in the gradients' dtype. norm_type: inf or positive.
    """
    of = units.units_in(model)
    rows = [each for each in map(units.divided_by_rows, of) if each is not None]
    own = {id(each) for unit in of for each in units.shown_parameters(unit)}
    others = [
        each.grad
        for each in model.parameters()
        if each.grad is not None and id(each) not in own and not _C._is_sharded(each)
    ]
    if any(map(is_dtensor, others)) or any(each.is_tensor_parallel for each in rows):
        return _clip_by_mesh(model, float(max_norm), float(norm_type))
    with contextlib.ExitStack() as given:
        for each in rows:
            given.enter_context(each.with_gradients())
        norm = _C._clip_grad_norm(of, others, float(max_norm), float(norm_type))
    return torch.tensor(norm, dtype=_dtype_of_gradients(model))


def _dtype_of_gradients(model):
    """Of their norm. A parameter without a gradient counts by its own: every rank has one dtype."""
    dtypes = [
        (each if each.grad is None else each.grad).dtype
        for each in model.parameters()
        if each.requires_grad
    ]
    return functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else None


def _clip_by_mesh(model, max_norm, norm_type):
    """With DTensors of tensor parallelism: a norm over each mesh, and one of these norms."""
    by_mesh = {}
    for each in model.parameters():
        if each.grad is not None:
            if not is_dtensor(each) and _C._is_sharded(each):
                units.refuse("clip_grad_norm_: flat shards and DTensors are in one model")
            mesh = each.grad.device_mesh if is_dtensor(each.grad) else None
            by_mesh.setdefault(mesh, []).append(each.grad)
    norms = [torch.nn.utils.get_total_norm(each, norm_type) for each in by_mesh.values()]
    norms = [each.full_tensor() if is_dtensor(each) else each for each in norms]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradients in by_mesh.values():
        for each in gradients:
            (each.to_local() if is_dtensor(each) else each).mul_(factor)
    return total
