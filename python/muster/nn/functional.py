# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.nn.functional's names: collectives that gradients flow through.

They return their results and leave inputs as they are. Backward is a collective too, so every
member that called forward must call backward through the same calls. Gradients are torch's, of
every order.
group: None is the default one. src and dst are ranks of the default group. A process that is not a
member gets its input back, or no tensors. Raises from forward and backward what the calls of the
same names in `muster` raise.
"""

from collections.abc import Sequence

import torch

from muster import _C

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def all_reduce(
    tensor: torch.Tensor, op: _C.ReduceOp = _C.ReduceOp.SUM, group: _C.ProcessGroup | None = None
) -> torch.Tensor:
    """All members' tensors combined by `op`. Backward is all_reduce with the same op: right for SUM
    and AVG.
    """
    return _C._nn_all_reduce(tensor, op, group)


def broadcast(tensor: torch.Tensor, src: int, group: _C.ProcessGroup | None = None) -> torch.Tensor:
    """src's tensor; as many elements everywhere. Backward sums the gradients up on src; elsewhere
    they are zeros.
    """
    return _C._nn_broadcast(tensor, src, group)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: _C.ReduceOp = _C.ReduceOp.SUM,
    group: _C.ProcessGroup | None = None,
) -> torch.Tensor:
    """On dst all members' tensors combined by `op`, elsewhere this member's own. Backward gives all
    the gradient of dst's result.
    """
    return _C._nn_reduce(tensor, dst, op, group)


def gather(
    tensor: torch.Tensor, dst: int = 0, group: _C.ProcessGroup | None = None
) -> tuple[torch.Tensor, ...]:
    """On dst the members' tensors; elsewhere zeros of their shapes, which belong into the loss so
    that backward comes to them. Backward gives each member its gradient from dst.
    """
    return _C._nn_gather(tensor, dst, group)


def scatter(
    tensors: Sequence[torch.Tensor], src: int = 0, group: _C.ProcessGroup | None = None
) -> torch.Tensor:
    """This member's of src's tensors. Off src `tensors` are as many of the same shape, whose values
    do not matter and whose gradients are zeros. Backward gathers the gradients on src.
    """
    return _C._nn_scatter(list(tensors), src, group)


def all_gather(
    tensor: torch.Tensor, group: _C.ProcessGroup | None = None
) -> tuple[torch.Tensor, ...]:
    """The members' tensors, of one shape. Backward sums up every member's gradients of this
    member's tensor.
    """
    return _C._nn_all_gather(tensor, group)


def _all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: _C.ProcessGroup | None = None
) -> torch.Tensor:
    """output_tensor, filled with the members' tensors (concatenated along dimension 0, or stacked).
    Backward, which torch has on nccl only, sums up every member's gradients of this member's part.
    """
    return _C._nn_all_gather_into_tensor(output_tensor, input_tensor, group)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: _C.ReduceOp = _C.ReduceOp.SUM,
    group: _C.ProcessGroup | None = None,
) -> torch.Tensor:
    """output, filled with input_list[this member] of all members combined by `op`; sizes may differ
    between the entries. Backward gathers the members' gradients.
    """
    return _C._nn_reduce_scatter(output, list(input_list), op, group)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: _C.ProcessGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """output_tensor_list, where entry r becomes input_tensor_list[this member] of member r; sizes
    may differ. Backward is the way back.
    """
    return _C._nn_all_to_all(list(output_tensor_list), list(input_tensor_list), group)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: _C.ProcessGroup | None = None,
) -> torch.Tensor:
    """output, filled with the rows of dimension 0 that the members send: as many to and from each
    as the splits say, None or empty for equal parts. Backward is the way back.
    """
    return _C._nn_all_to_all_single(output, input, output_split_sizes, input_split_sizes, group)
