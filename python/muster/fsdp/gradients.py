# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of sharded models."""

import contextlib
import functools
import math

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import Replicate

from muster import _C
from muster.nn.modules_in_use import is_dtensor

from . import units


def clip_grad_norm_(model, max_norm, norm_type=2.0):
    """Collective: the norm of all gradients over all ranks, which are multiplied so that it is at
    most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does for a model that is whole on each
    rank. Returns the norm before that, in the gradients' dtype. norm_type: inf or positive.
    """
    if not norm_type > 0:
        units.refuse(f"clip_grad_norm_: norm_type is {norm_type}, and must be more than 0 or inf")
    of = units.units_in(model)
    rows = [each for each in map(units.divided_by_rows, of) if each is not None]
    for each in rows:
        each.check_between_passes()
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


@torch.no_grad()
def _clip_by_mesh(model, max_norm, norm_type):
    """With DTensors of tensor parallelism. As in the engine's norm, each element counts once, and
    plain gradients by their mean over the ranks; all ranks get one number, bit for bit.
    """
    plain, of_parts, gradients, dims = [], {}, [], {}
    for each in model.parameters():
        if not is_dtensor(each) and _C._is_sharded(each):
            units.refuse("clip_grad_norm_: flat shards and DTensors are in one model")
        # A rank without the gradient takes part all the same: others may have it.
        shown = each if each.grad is None else each.grad
        if each.grad is not None:
            gradients.append(_local(each.grad))
        if not is_dtensor(shown):
            plain += [] if each.grad is None else [each.grad]
            continue
        mesh = shown.device_mesh
        dims |= {mesh.get_group(dim).group_name: (mesh, dim) for dim in range(mesh.ndim)}
        whole = _without_partial_sums(shown)
        sharded = tuple(at for at, how in enumerate(whole.placements) if not how.is_replicate())
        parts = of_parts.setdefault((mesh, sharded), [])
        parts += [] if each.grad is None else [whole.to_local()]
    is_max = math.isinf(norm_type)
    mean = _power(plain, norm_type)
    if not is_max:
        for mesh, dim in dims.values():
            mean = _over(mean, "sum", mesh, dim) / mesh.size(dim)
    powers = [mean]
    for (mesh, sharded), parts in of_parts.items():
        power = _power(parts, norm_type)
        for dim in sharded:
            power = _over(power, "max" if is_max else "sum", mesh, dim)
        powers.append(power)
    total = _greatest(powers) if is_max else sum(powers)
    for mesh, dim in dims.values():  # ranks may have added in another order
        total = _over(total, "max", mesh, dim)
    norm = total if is_max else total ** (1 / norm_type)
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:
        for each in gradients:
            each.mul_(factor)
    return torch.tensor(norm, dtype=_dtype_of_gradients(model))


def _local(gradient):
    return gradient.to_local() if is_dtensor(gradient) else gradient


def _without_partial_sums(gradient):
    """Collective where it has some."""
    if not any(each.is_partial() for each in gradient.placements):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if each.is_partial() else each for each in gradient.placements]
    )


def _power(tensors, norm_type):
    """The sum of the elements' absolute values to the power of `norm_type`, or with infinity their
    maximum.
    """
    norms = [
        torch.linalg.vector_norm(
            each, norm_type, dtype=torch.complex128 if each.is_complex() else torch.float64
        ).item()
        for each in tensors
        if each.numel() > 0
    ]
    return _greatest(norms) if math.isinf(norm_type) else sum(each**norm_type for each in norms)


def _greatest(numbers):
    """NaN if any is; 0 of none."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


def _over(number, how, mesh, dim):
    """Collective: reduces a number of each rank; NaN if any is."""
    is_nan = math.isnan(number)
    both = torch.tensor(
        [0.0 if is_nan else number, float(is_nan)], dtype=torch.float64, device=mesh.device_type
    )
    reduced, nans = functional.wait_tensor(functional.all_reduce(both, how, (mesh, dim))).tolist()
    return math.nan if nans else reduced
