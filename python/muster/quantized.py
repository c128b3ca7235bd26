# SPDX-License-Identifier: BSD-3-Clause
"""Collectives that send fewer bytes: values travel as bf16, int8 or int4.

Each is the function of muster with that name and the option `compression`, "int8" where none is
given. docs/user/quantized.md says what it costs and how exact it is.
"""

import datetime
from collections.abc import Sequence

from torch import Tensor

from . import _C
from ._C import ProcessGroup, ReduceOp, Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
]

_SUM = ReduceOp.SUM


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = _SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """The sum or average of all members' tensors, in place: the same bits on every rank."""
    return _C.all_reduce(tensor, op, group, async_op, timeout=timeout, compression=compression)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = _SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """`output` of member r becomes the sum or average of all members' input_list[r]."""
    return _C.reduce_scatter(
        output, input_list, op, group, async_op, timeout=timeout, compression=compression
    )


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp = _SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """`reduce_scatter` of the members' parts in one tensor."""
    return _C.reduce_scatter_tensor(
        output, input, op, group, async_op, timeout=timeout, compression=compression
    )


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """tensor_list[r] becomes member r's tensor as it travels, on all members, also on r."""
    return _C.all_gather(
        tensor_list, tensor, group, async_op, timeout=timeout, compression=compression
    )


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """`all_gather` into one tensor."""
    return _C.all_gather_into_tensor(
        output_tensor, input_tensor, group, async_op, timeout=timeout, compression=compression
    )


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    compression: str = "int8",
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """src's tensor as it travels goes to all members; src takes it too."""
    return _C.broadcast(
        tensor, src, group, async_op, group_src, timeout=timeout, compression=compression
    )
