# SPDX-License-Identifier: BSD-3-Clause
"""The functional collectives as operators of torch's library `muster`: what torch.compile and
export put into their graphs.

Each has a kernel, the shape of its result for tracing, and where there is one its gradient, which
is made of the same operators. A group is given by its name. A reduction is a name in small letters;
`premul_sum:2.0` carries its factor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from .distributed_c10d import _resolve_process_group


def _reduction(text: str) -> _C.ReduceOp:
    name, _, factor = text.partition(":")
    return _C._make_nccl_premul_sum(float(factor)) if factor else getattr(_C.ReduceOp, name.upper())


def _operator(schema: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """An operator of the function's name: `muster::all_reduce` of all_reduce."""

    def define(kernel: Callable[..., Any]) -> Any:
        return torch.library.custom_op(
            f"muster::{kernel.__name__}", kernel, mutates_args=mutates, schema=schema
        )

    return define


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# ---- all_reduce


@_operator("(Tensor self, str op, str group) -> Tensor")
def all_reduce(self: Tensor, op: str, group: str) -> Tensor:
    result = _contiguous_copy(self)
    _C.all_reduce(result, _reduction(op), _resolve_process_group(group))
    return result


@all_reduce.register_fake
def _(self: Tensor, op: str, group: str) -> Tensor:
    return _like(self)


def _keep_reduction(ctx: Any, inputs: Any, output: Tensor) -> None:
    tensor, ctx.op, ctx.group = inputs
    if ctx.op in ("min", "max"):
        ctx.save_for_backward(tensor, output)


def _reduced_gradient(op: str, group: str, gradient: Tensor, given: Sequence[Tensor]) -> Tensor:
    name, _, factor = op.partition(":")
    if name in ("sum", "avg"):
        return all_reduce(gradient, op, group)
    if name == "premul_sum":
        return all_reduce(gradient, "sum", group) * float(factor)
    if name in ("min", "max"):
        tensor, result = given
        holds = (tensor == result).to(gradient.dtype)
        holders = all_reduce(holds, "sum", group)
        return all_reduce(gradient, "sum", group) * holds / holders
    raise RuntimeError(f"all_reduce with {op!r} has no gradient; sum, avg, min and max have one")


def _all_reduce_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _reduced_gradient(ctx.op, ctx.group, gradient, ctx.saved_tensors), None, None


all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_reduction)


@_operator("(Tensor[] tensors, str op, str group) -> Tensor[]")
def all_reduce_coalesced(tensors: list[Tensor], op: str, group: str) -> list[Tensor]:
    results = [_contiguous_copy(each) for each in tensors]
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in results:
        alike.setdefault((each.dtype, each.device), []).append(each)
    for some in alike.values() or [results]:  # one call has one dtype
        _C.all_reduce_coalesced(some, _reduction(op), _resolve_process_group(group))
    return results


@all_reduce_coalesced.register_fake
def _(tensors: list[Tensor], op: str, group: str) -> list[Tensor]:
    return [_like(each) for each in tensors]


def _keep_reductions(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, ctx.op, ctx.group = inputs
    ctx.count = len(tensors)
    if ctx.op in ("min", "max"):
        ctx.save_for_backward(*tensors, *output)


def _all_reduce_coalesced_backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, None, None]:
    saved = ctx.saved_tensors
    of_each = [(saved[i], saved[ctx.count + i]) if saved else () for i in range(ctx.count)]
    return (
        [
            None if gradient is None else _reduced_gradient(ctx.op, ctx.group, gradient, given)
            for gradient, given in zip(gradients, of_each, strict=True)
        ],
        None,
        None,
    )


all_reduce_coalesced.register_autograd(
    _all_reduce_coalesced_backward, setup_context=_keep_reductions
)


# ---- broadcast


@_operator("(Tensor self, int src, str group) -> Tensor")
def broadcast(self: Tensor, src: int, group: str) -> Tensor:
    result = _contiguous_copy(self)
    _C.broadcast(result, None, _resolve_process_group(group), False, src)
    return result


@broadcast.register_fake
def _(self: Tensor, src: int, group: str) -> Tensor:
    return _like(self)


def _keep_root(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.src, ctx.group = inputs


def _broadcast_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    total = all_reduce(gradient, "sum", ctx.group)
    is_root = _resolve_process_group(ctx.group).rank() == ctx.src
    return total if is_root else torch.zeros_like(total), None, None


broadcast.register_autograd(_broadcast_backward, setup_context=_keep_root)


# ---- all_gather and reduce_scatter, along a dimension


@_operator("(Tensor self, int dim, str group) -> Tensor")
def all_gather(self: Tensor, dim: int, group: str) -> Tensor:
    members = _resolve_process_group(group)
    given = self.contiguous()
    parts = given.new_empty(members.size(), *given.shape)
    _C.all_gather_into_tensor(parts, given, members)
    return parts.flatten(0, 1) if dim % self.dim() == 0 else torch.cat(parts.unbind(), dim)


@all_gather.register_fake
def _(self: Tensor, dim: int, group: str) -> Tensor:
    sizes = list(self.shape)
    sizes[dim] *= _resolve_process_group(group).size()
    return self.new_empty(sizes)


def _keep_dimension(ctx: Any, inputs: Any, output: Tensor) -> None:
    *ctx.op, ctx.dim, ctx.group = inputs[1:]


def _all_gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return reduce_scatter(gradient, "sum", ctx.dim, ctx.group), None, None


all_gather.register_autograd(_all_gather_backward, setup_context=_keep_dimension)


def _part_size(self: Tensor, dim: int, group: str) -> int:
    size = _resolve_process_group(group).size()
    if self.size(dim) % size:
        raise _C.DistArgumentError(
            f"dimension {dim} of {list(self.shape)} cannot be cut into {size} parts of one size"
        )
    return self.size(dim) // size


@_operator("(Tensor self, str op, int dim, str group) -> Tensor")
def reduce_scatter(self: Tensor, op: str, dim: int, group: str) -> Tensor:
    pieces = self.split(_part_size(self, dim, group), dim) if self.size(dim) else [self]
    given = torch.cat(pieces) if dim % self.dim() else self.contiguous()
    members = _resolve_process_group(group)
    result = given.new_empty(given.size(0) // members.size(), *given.shape[1:])
    _C.reduce_scatter_tensor(result, given, _reduction(op), members)
    return result


@reduce_scatter.register_fake
def _(self: Tensor, op: str, dim: int, group: str) -> Tensor:
    sizes = list(self.shape)
    sizes[dim] = _part_size(self, dim, group)
    return self.new_empty(sizes)


def _reduce_scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (op,) = ctx.op
    if op not in ("sum", "avg"):
        raise RuntimeError(f"reduce_scatter with {op!r} has no gradient; sum and avg have one")
    gathered = all_gather(gradient, ctx.dim, ctx.group)
    if op == "avg":
        gathered = gathered / _resolve_process_group(ctx.group).size()
    return gathered, None, None, None


reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_keep_dimension)


# ---- all_to_all


@_operator("(Tensor self, SymInt[]? received, SymInt[]? sent, str group) -> Tensor")
def all_to_all(
    self: Tensor, received: list[int] | None, sent: list[int] | None, group: str
) -> Tensor:
    rows = self.size(0) if received is None else sum(received)
    result = self.new_empty(rows, *self.shape[1:])
    _C.all_to_all_single(result, self.contiguous(), received, sent, _resolve_process_group(group))
    return result


@all_to_all.register_fake
def _(self: Tensor, received: list[int] | None, sent: list[int] | None, group: str) -> Tensor:
    rows = self.size(0) if received is None else sum(received)
    return self.new_empty([rows, *self.shape[1:]])


def _keep_splits(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.received, ctx.sent, ctx.group = inputs


def _all_to_all_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return all_to_all(gradient, ctx.sent, ctx.received, ctx.group), None, None, None


all_to_all.register_autograd(_all_to_all_backward, setup_context=_keep_splits)


# ---- into tensors that are given


@_operator("(Tensor(a!)[] outputs, Tensor input, str group) -> ()", ["outputs"])
def all_gather_into(outputs: list[Tensor], input: Tensor, group: str) -> None:
    _C.all_gather(outputs, input.contiguous(), _resolve_process_group(group))


@_operator("(Tensor(a!) output, Tensor[] inputs, str op, str group) -> ()", ["output"])
def reduce_scatter_into(output: Tensor, inputs: list[Tensor], op: str, group: str) -> None:
    given = [each.contiguous() for each in inputs]
    _C.reduce_scatter(output, given, _reduction(op), _resolve_process_group(group))


@_operator(
    "(str[] kinds, int[] peers, int[] tags, Tensor(a!)[] tensors, str group) -> ()", ["tensors"]
)
def messages(
    kinds: list[str], peers: list[int], tags: list[int], tensors: list[Tensor], group: str
) -> None:
    """Messages that go (`isend`) and come, all at once; peers are ranks of the group."""
    members = _resolve_process_group(group)
    works = _C.batch_of_messages(
        [
            (kind == "isend", tensor, None, members, tag, peer)
            for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True)
        ]
    )
    for work in works:
        work.wait()


for _no_result in (all_gather_into, reduce_scatter_into, messages):
    _no_result.register_fake(lambda *_: None)
