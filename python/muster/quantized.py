# SPDX-License-Identifier: BSD-3-Clause
"""Collectives that send fewer bytes: values travel as bf16, int8 or int4.

Each is the function of muster with that name and the option `compression`, "int8" where none is
given. `group` is a group of muster's, or one of torch.distributed's whose backend is muster; None
is muster's default group, or torch.distributed's in a program that has initialised that alone.
docs/user/quantized.md says what it costs and how exact it is.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as _stock
from torch import Tensor

from . import _C
from ._C import ProcessGroup, ReduceOp, Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "comm_hook",
    "reduce_scatter",
    "reduce_scatter_tensor",
]

_SUM = ReduceOp.SUM
_Group = ProcessGroup | _stock.ProcessGroup | None
_Op = ReduceOp | _stock.ReduceOp | _stock.ReduceOp.RedOpType


def _stock_group(group: _Group) -> _stock.ProcessGroup | None:
    """The group of torch.distributed that is meant; None: it is one of muster's."""
    if group is None and not _C.is_initialized() and _stock.is_initialized():
        return _stock.distributed_c10d._get_default_group()
    return group if isinstance(group, _stock.ProcessGroup) else None


def _ours(group: _Group, tensor: Tensor) -> ProcessGroup | None:
    """Muster's group that carries out the calls of `group`."""
    if group == _stock.GroupMember.NON_GROUP_MEMBER:
        raise _C.DistArgumentError("muster.quantized: this process is not a member of the group")
    stock = _stock_group(group)
    if stock is None:
        return group  # type: ignore[return-value]
    backend = stock._get_backend(tensor.device)
    if not isinstance(backend, _C.ProcessGroupMuster):
        raise _C.DistArgumentError(
            f"muster.quantized: the group's backend for {tensor.device.type} is "
            f"{backend.name()!r}, which compresses nothing; make the group with backend 'muster'"
        )
    return backend._group


def _op(op: _Op) -> ReduceOp:
    """Muster's operation of that name."""
    if isinstance(op, ReduceOp):
        return op
    name: str = getattr(op, "op", op).name
    found = getattr(ReduceOp, name, None)
    if not isinstance(found, ReduceOp):
        raise _C.DistArgumentError(f"muster.quantized: only SUM and AVG are possible, not {name}")
    return found


def all_reduce(
    tensor: Tensor,
    op: _Op = _SUM,
    group: _Group = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    feedback: Tensor | None = None,
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """The sum or average of all members' tensors, in place: the same bits on every rank.

    feedback, of float32 tensors: one like `tensor`, zeros at first. It is added to the values, and
    afterwards holds what this rank's rounding has lost, for the next call to make up for.
    """
    if feedback is not None:
        return _C._all_reduce_with_feedback(
            tensor, feedback, _op(op), _ours(group, tensor), async_op, timeout, compression
        )
    return _C.all_reduce(
        tensor,
        _op(op),
        _ours(group, tensor),
        async_op,
        timeout=timeout,
        compression=compression,
    )


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: _Op = _SUM,
    group: _Group = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """`output` of member r becomes the sum or average of all members' input_list[r]."""
    return _C.reduce_scatter(
        output,
        input_list,
        _op(op),
        _ours(group, output),
        async_op,
        timeout=timeout,
        compression=compression,
    )


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: _Op = _SUM,
    group: _Group = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """`reduce_scatter` of the members' parts in one tensor."""
    return _C.reduce_scatter_tensor(
        output,
        input,
        _op(op),
        _ours(group, output),
        async_op,
        timeout=timeout,
        compression=compression,
    )


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: _Group = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """tensor_list[r] becomes member r's tensor as it travels, on all members, also on r."""
    return _C.all_gather(
        tensor_list,
        tensor,
        _ours(group, tensor),
        async_op,
        timeout=timeout,
        compression=compression,
    )


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: _Group = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """`all_gather` into one tensor."""
    return _C.all_gather_into_tensor(
        output_tensor,
        input_tensor,
        _ours(group, output_tensor),
        async_op,
        timeout=timeout,
        compression=compression,
    )


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: _Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """src's tensor as it travels goes to all members; src takes it too."""
    stock = _stock_group(group)
    if stock is not None and src is not None:
        src, group_src = None, _stock.get_group_rank(stock, src)
    return _C.broadcast(
        tensor,
        src,
        _ours(group, tensor),
        async_op,
        group_src,
        timeout=timeout,
        compression=compression,
    )


def comm_hook(
    compression: str = "int8",
) -> Callable[[Any, _stock.GradBucket], torch.futures.Future[Tensor]]:
    """A communication hook for stock torch's DistributedDataParallel over a group whose backend is
    muster: `model.register_comm_hook(None, muster.quantized.comm_hook("int4"))`. The hook's state
    is the group to average over, or None for stock torch's default group. Muster's own
    DistributedDataParallel has int8_compress_hook and int4_compress_hook.
    """

    def quantized_hook(state: Any, bucket: _stock.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        group = _stock.group.WORLD if state is None else state  # not muster's own default group
        work = all_reduce(buffer, ReduceOp.AVG, group, async_op=True, compression=compression)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    return quantized_hook
