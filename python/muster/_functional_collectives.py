# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed._functional_collectives' names: collectives that return their results and leave
their inputs as they are.

A group is a ProcessGroup, its name (`group_name`), a DeviceMesh of one dimension, a (mesh,
dimension) pair, or the list of ranks of an existing group. Results are there when a call returns:
`wait_tensor` gives its argument. Gradients flow through all calls, those whose names end in
`_autograd` and the others alike. They raise as `muster`'s calls of the same kind do.

torch.compile traces these calls: they are operators of the library `muster`
(_functional_operators.py). The calls that give a Work (`isend_inplace`, `irecv_inplace`) are none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from . import _C
from . import _functional_operators as operators
from ._lookups import constant_in_graphs
from .distributed_c10d import _resolve_process_group

Tensors = list[Tensor]
RANK_TYPES = (
    list[int] | list[list[int]] | _C.ProcessGroup | _C.DeviceMesh | tuple[_C.DeviceMesh, int] | str
)

REDUCE_OP_TO_STR = {
    getattr(_C.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def _name(given: Any) -> str:
    """The group's name: what the operators take. torch.compile follows these lines, and looks once
    at what they call; numbers go there as text, by which it knows them.
    """
    if given is None:
        return _name_of_default()
    if isinstance(given, str):
        return given
    if isinstance(given, _C.ProcessGroup):
        return given.group_name
    if isinstance(given, _C.DeviceMesh):
        return _name_in_mesh(given, "")
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], _C.DeviceMesh):
        return _name_in_mesh(given[0], f"{given[1]}")
    if isinstance(given, (list, tuple)) and given:
        lists = given if isinstance(given[0], (list, tuple)) else [given]
        return _name_of_ranks(";".join([" ".join([f"{rank}" for rank in one]) for one in lists]))
    raise ValueError(
        "a group is a ProcessGroup, its name, a DeviceMesh, (mesh, dimension) or a list of ranks, "
        f"not {given!r}"
    )


@constant_in_graphs
def _name_of_default() -> str:
    return _C.default_group().group_name


@constant_in_graphs
def _name_in_mesh(mesh: _C.DeviceMesh, dimension: str) -> str:
    """dimension: a name or a number; empty for the only one."""
    if not dimension:
        return mesh.get_group().group_name
    is_number = dimension.lstrip("-").isdigit()
    return mesh.get_group(int(dimension) if is_number else dimension).group_name


@constant_in_graphs
def _name_of_ranks(lists: str) -> str:
    """Name of the group of this rank's list. Semicolons separate the lists."""
    ranks = [[int(rank) for rank in one.split()] for one in lists.split(";")]
    mine = next((each for each in ranks if _C.get_rank() in each), None)
    if mine is None:
        raise _C.DistArgumentError(f"this rank is in none of {ranks}")
    if mine == _C.get_process_group_ranks(_C.default_group()):
        return _name_of_default()
    return _resolve_process_group(str(mine)).group_name


@constant_in_graphs
def _size_and_rank(name: str) -> tuple[int, int]:
    members = _resolve_process_group(name)
    return members.size(), members.rank()


@constant_in_graphs
def _op(given: str | _C.ReduceOp) -> str:
    """As the operators take it: a name, and premul_sum's factor behind it."""
    if isinstance(given, _C.ReduceOp):
        name = given.name.lower()
        return f"{name}:{given.factor!r}" if name == "premul_sum" else name
    if given.lower() not in REDUCE_OP_TO_STR.values():
        raise ValueError(
            f"{given!r} is no reduction; they are {', '.join(REDUCE_OP_TO_STR.values())}"
        )
    return given.lower()


def wait_tensor(tensor: Tensor) -> Tensor:
    """The tensor: it is there."""
    return tensor


def wait_tensors(tensors: Tensors) -> Tensors:
    """The tensors: they are there."""
    return tensors


def broadcast(self: Tensor, src: int, group: RANK_TYPES, tag: str = "") -> Tensor:
    """src's tensor, on every member. src: a rank of the group. Backward sums up all members'
    gradients on src; they are zero elsewhere.
    """
    return operators.broadcast(self, src, _name(group))


def all_reduce(
    self: Tensor, reduceOp: str | _C.ReduceOp, group: RANK_TYPES, tag: str = ""
) -> Tensor:
    """All members' tensors combined. reduceOp: `sum`, `avg`, `product`, `min`, `max`, `band`,
    `bor`, `bxor`, or a ReduceOp. Backward of sums and averages is the same call for the gradients;
    of `min` and `max` the members that hold the result share its gradient.
    """
    return operators.all_reduce(self, _op(reduceOp), _name(group))


def all_reduce_coalesced(
    self: Tensors, reduceOp: str | _C.ReduceOp, group: RANK_TYPES, tag: str = ""
) -> Tensors:
    """`all_reduce` of several tensors, as one call for each dtype."""
    return operators.all_reduce_coalesced(self, _op(reduceOp), _name(group))


def all_gather_single(self: Tensor, gather_dim: int, group: RANK_TYPES, tag: str = "") -> Tensor:
    """The members' tensors, concatenated along gather_dim. Backward sums up every member's
    gradients of this member's tensor.
    """
    return operators.all_gather(self, gather_dim, _name(group))


def all_gather_single_coalesced(self: Tensors, group: RANK_TYPES, tag: str = "") -> Tensors:
    """`all_gather_single` of several tensors, along dimension 0."""
    return [all_gather_single(each, 0, group, tag) for each in self]


def reduce_scatter_single(
    self: Tensor, reduceOp: str, scatter_dim: int, group: RANK_TYPES, tag: str = ""
) -> Tensor:
    """This member's part, along scatter_dim, of all members' tensors combined. Backward of `sum`
    gathers the members' gradients; for `avg` each is divided by their number.
    """
    return operators.reduce_scatter(self, _op(reduceOp), scatter_dim, _name(group))


def reduce_scatter_single_coalesced(
    inputs: Tensors, reduceOp: str, scatter_dim: list[int], group: RANK_TYPES, tag: str = ""
) -> Tensors:
    """`reduce_scatter_single` of several tensors, each along its dimension."""
    return [
        reduce_scatter_single(each, reduceOp, dim, group, tag)
        for each, dim in zip(inputs, scatter_dim, strict=True)
    ]


def all_to_all_single(
    self: Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: RANK_TYPES,
    tag: str = "",
) -> Tensor:
    """The rows of dimension 0 that the members send, as many to and from each as the splits say;
    None for equal parts. Backward is the way back.
    """
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise _C.DistArgumentError("give output_split_sizes and input_split_sizes, or neither")
    return operators.all_to_all(self, output_split_sizes, input_split_sizes, _name(group))


def permute_tensor(self: Tensor, src_dst: list[int], group: RANK_TYPES, tag: str = "") -> Tensor:
    """The elements that come to this member where member m sends its tensor to member src_dst[m],
    in one dimension; all tensors have one size.
    """
    name = _name(group)
    size, rank = _size_and_rank(name)
    flat = self.reshape(-1)
    counts_out, counts_in = [0] * size, [0] * size
    for source, target in enumerate(src_dst):
        if source == rank:
            counts_out[target] = flat.numel()
        if target == rank:
            counts_in[source] = flat.numel()
    return all_to_all_single(flat, counts_in, counts_out, name, tag)


# ---- into tensors that are given: torch replaces muster's own calls by these where it traces


def all_gather_tensor_inplace(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    tag: str = "",
    gather_dim: int = 0,
) -> Tensor:
    """output_tensor, filled by `all_gather_single`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    return output_tensor.copy_(all_gather_single(input_tensor, gather_dim, group, tag))


def reduce_scatter_tensor_inplace(
    output: Tensor,
    input: Tensor,
    op: str = "sum",
    group: Any = None,
    async_op: bool = False,
    scatter_dim: int = 0,
    tag: str = "",
) -> Tensor:
    """output, filled by `reduce_scatter_single`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    return output.copy_(reduce_scatter_single(input, op, scatter_dim, group, tag))


def all_reduce_inplace(
    tensor: Tensor, op: str = "sum", group: Any = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """tensor, filled by `all_reduce`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    return tensor.copy_(all_reduce(tensor, op, group, tag))


def all_to_all_inplace(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """output, filled by `all_to_all_single`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    return output.copy_(all_to_all_single(input, output_split_sizes, input_split_sizes, group, tag))


def all_gather_inplace(
    tensor_list: Tensors, tensor: Tensor, group: Any = None, async_op: bool = False, tag: str = ""
) -> Tensors:
    """tensor_list, filled by `all_gather`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    operators.all_gather_into(tensor_list, tensor, _name(group))
    return tensor_list


def reduce_scatter_inplace(
    output: Tensor,
    input_list: Tensors,
    op: str = "sum",
    group: _C.ProcessGroup | None = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """output, filled by `reduce_scatter`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    operators.reduce_scatter_into(output, input_list, _op(op), _name(group))
    return output


def isend_inplace(
    tensor: Tensor,
    dst: int | None = None,
    tag: int = 0,
    group: _C.ProcessGroup | None = None,
    group_dst: int = -1,
) -> Any:
    """`isend`: a Work."""
    return _C.isend(tensor, dst, group, tag, None if dst is not None else group_dst)


def irecv_inplace(
    tensor: Tensor,
    src: int | None = None,
    tag: int = 0,
    group: _C.ProcessGroup | None = None,
    group_src: int = -1,
) -> Any:
    """`irecv`: a Work."""
    any_rank = src is None and group_src < 0
    return _C.irecv(tensor, src, group, tag, None if src is not None or any_rank else group_src)


def batch_p2p_ops_inplace(
    op_list: list[str],
    peer_list: list[int],
    tag_list: list[int],
    tensors: Tensors,
    group_name: RANK_TYPES,
) -> Tensors:
    """The tensors, once all messages have come and gone: op_list has `isend` and `irecv`, peer_list
    ranks of the group.
    """
    operators.messages(op_list, peer_list, tag_list, tensors, _name(group_name))
    return tensors


def _refuse_async(async_op: bool) -> None:
    if async_op:
        raise _C.DistArgumentError(
            "a functional collective has no Work: leave async_op out, or call muster's own with it"
        )


@contextlib.contextmanager
def allow_inflight_collective_as_graph_input_ctx(value: bool = True) -> Iterator[None]:
    """Nothing: no result is under way when its call returns."""
    yield


# Gradients flow through all of them.
all_gather_single_autograd = all_gather_single
reduce_scatter_single_autograd = reduce_scatter_single
all_to_all_single_autograd = all_to_all_single

# The older names.
all_gather_tensor = all_gather_single
all_gather_tensor_autograd = all_gather_single_autograd
all_gather_into_tensor_coalesced = all_gather_single_coalesced
reduce_scatter_tensor = reduce_scatter_single
reduce_scatter_tensor_autograd = reduce_scatter_single_autograd
reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
