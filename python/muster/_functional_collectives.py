"""torch.distributed._functional_collectives' names: collectives that return their results and leave their inputs as they are.

A group is a ProcessGroup, its name (`group_name`), a DeviceMesh of one dimension, a (mesh, dimension) pair, or the list of ranks of an
existing group. Results are there when a call returns: `wait_tensor` gives its argument. Gradients flow through the calls whose names end
in `_autograd`, and through those of `muster.nn.functional`. What `muster`'s calls of the same kind raise, these raise.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from .distributed_c10d import _resolve_process_group
from .nn import functional

Tensors = list[Tensor]
RANK_TYPES = (
    list[int] | list[list[int]] | _C.ProcessGroup | _C.DeviceMesh | tuple[_C.DeviceMesh, int] | str
)

REDUCE_OP_TO_STR = {
    getattr(_C.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_OPERATIONS = {name: op for op, name in REDUCE_OP_TO_STR.items()}


def _op(given: str | _C.ReduceOp) -> _C.ReduceOp:
    if isinstance(given, _C.ReduceOp):
        return given
    if given.lower() not in _OPERATIONS:
        raise ValueError(f"{given!r} is no reduction; they are {', '.join(_OPERATIONS)}")
    return _OPERATIONS[given.lower()]


def _group(given: Any) -> _C.ProcessGroup:
    if given is None:
        return _C.default_group()
    if isinstance(given, _C.ProcessGroup):
        return given
    if isinstance(given, str):
        return _resolve_process_group(given)
    if isinstance(given, _C.DeviceMesh):
        return given.get_group()
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], _C.DeviceMesh):
        return given[0].get_group(given[1])
    if isinstance(given, (list, tuple)):
        lists = given if given and isinstance(given[0], (list, tuple)) else [given]
        mine = next((each for each in lists if _C.get_rank() in each), None)
        if mine is None:
            raise _C.DistArgumentError(f"this rank is in none of {list(given)}")
        if list(mine) == _C.get_process_group_ranks(_C.default_group()):
            return _C.default_group()
        return _resolve_process_group(str(list(mine)))
    raise ValueError(
        f"a group is a ProcessGroup, its name, a DeviceMesh, (mesh, dimension) or a list of ranks, not {given!r}"
    )


def _whole(tensor: Tensor) -> Tensor:
    """Its values in memory of their own order."""
    return tensor.detach().contiguous()


def wait_tensor(tensor: Tensor) -> Tensor:
    """The tensor: it is there."""
    return tensor


def wait_tensors(tensors: Tensors) -> Tensors:
    """The tensors: they are there."""
    return tensors


def broadcast(self: Tensor, src: int, group: RANK_TYPES, tag: str = "") -> Tensor:
    """src's tensor, on every member. src: a rank of the group."""
    result = _whole(self).clone()
    _C.broadcast(result, None, _group(group), False, src)
    return result


def all_reduce(
    self: Tensor, reduceOp: str | _C.ReduceOp, group: RANK_TYPES, tag: str = ""
) -> Tensor:
    """All members' tensors combined. reduceOp: `sum`, `avg`, `product`, `min`, `max`, `band`, `bor`, `bxor`, or a ReduceOp."""
    result = _whole(self).clone()
    _C.all_reduce(result, _op(reduceOp), _group(group))
    return result


def all_reduce_coalesced(
    self: Tensors, reduceOp: str | _C.ReduceOp, group: RANK_TYPES, tag: str = ""
) -> Tensors:
    """`all_reduce` of several tensors, as one call."""
    results = [_whole(each).clone() for each in self]
    _C.all_reduce_coalesced(results, _op(reduceOp), _group(group))
    return results


def all_gather_single(self: Tensor, gather_dim: int, group: RANK_TYPES, tag: str = "") -> Tensor:
    """The members' tensors, concatenated along gather_dim."""
    members = _group(group)
    given = _whole(self)
    parts = given.new_empty(members.size(), *given.shape)
    _C.all_gather_into_tensor(parts, given, members)
    return torch.cat(list(parts.unbind()), gather_dim)


def all_gather_single_coalesced(self: Tensors, group: RANK_TYPES, tag: str = "") -> Tensors:
    """`all_gather_single` of several tensors, along dimension 0."""
    return [all_gather_single(each, 0, group, tag) for each in self]


def _pieces(tensor: Tensor, dim: int, size: int) -> Tensor:
    """One for each member, one after another along dimension 0."""
    if tensor.size(dim) % size:
        raise _C.DistArgumentError(
            f"dimension {dim} of {list(tensor.shape)} cannot be cut into {size} parts of one size"
        )
    return torch.cat(tensor.chunk(size, dim)) if dim % tensor.dim() else tensor


def reduce_scatter_single(
    self: Tensor, reduceOp: str, scatter_dim: int, group: RANK_TYPES, tag: str = ""
) -> Tensor:
    """This member's part, along scatter_dim, of all members' tensors combined."""
    members = _group(group)
    given = _pieces(_whole(self), scatter_dim, members.size()).contiguous()
    result = given.new_empty(given.size(0) // members.size(), *given.shape[1:])
    _C.reduce_scatter_tensor(result, given, _op(reduceOp), members)
    return result


def reduce_scatter_single_coalesced(
    inputs: Tensors, reduceOp: str, scatter_dim: list[int], group: RANK_TYPES, tag: str = ""
) -> Tensors:
    """`reduce_scatter_single` of several tensors, each along its dimension."""
    return [
        reduce_scatter_single(each, reduceOp, dim, group, tag)
        for each, dim in zip(inputs, scatter_dim, strict=True)
    ]


def _rows_received(self: Tensor, output: Sequence[int] | None, input: Sequence[int] | None) -> int:
    if (output is None) != (input is None):
        raise _C.DistArgumentError("give output_split_sizes and input_split_sizes, or neither")
    return self.size(0) if output is None else sum(output)


def all_to_all_single(
    self: Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: RANK_TYPES,
    tag: str = "",
) -> Tensor:
    """The rows of dimension 0 that the members send, as many to and from each as the splits say; None for equal parts."""
    given = _whole(self)
    rows = _rows_received(given, output_split_sizes, input_split_sizes)
    result = given.new_empty(rows, *given.shape[1:])
    _C.all_to_all_single(result, given, output_split_sizes, input_split_sizes, _group(group))
    return result


def permute_tensor(self: Tensor, src_dst: list[int], group: RANK_TYPES, tag: str = "") -> Tensor:
    """The elements that come to this member where member m sends its tensor to member src_dst[m], in one dimension; all tensors have one
    size."""
    members = _group(group)
    flat = self.reshape(-1)
    counts_out, counts_in = [0] * members.size(), [0] * members.size()
    for source, target in enumerate(src_dst):
        if source == members.rank():
            counts_out[target] = flat.numel()
        if target == members.rank():
            counts_in[source] = flat.numel()
    return all_to_all_single(flat, counts_in, counts_out, members, tag)


# ---- with gradients


def all_gather_single_autograd(
    self: Tensor, gather_dim: int, group: RANK_TYPES, tag: str = ""
) -> Tensor:
    """`all_gather_single`; backward sums up every member's gradients of this member's tensor."""
    return torch.cat(list(functional.all_gather(self.contiguous(), _group(group))), gather_dim)


def reduce_scatter_single_autograd(
    self: Tensor, reduceOp: str, scatter_dim: int, group: RANK_TYPES, tag: str = ""
) -> Tensor:
    """`reduce_scatter_single`; backward gathers the members' gradients, each divided by their number for `avg`."""
    members = _group(group)
    parts = [each.contiguous() for each in self.chunk(members.size(), scatter_dim)]
    average = _op(reduceOp) == _C.ReduceOp.AVG
    output = torch.empty_like(parts[members.rank()])
    summed = functional.reduce_scatter(
        output, parts, _C.ReduceOp.SUM if average else _op(reduceOp), members
    )
    return summed / members.size() if average else summed


def all_to_all_single_autograd(
    self: Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: RANK_TYPES,
    tag: str = "",
) -> Tensor:
    """`all_to_all_single`; backward is the way back."""
    rows = _rows_received(self, output_split_sizes, input_split_sizes)
    output = self.new_empty(rows, *self.shape[1:])
    return functional.all_to_all_single(
        output, self.contiguous(), output_split_sizes, input_split_sizes, _group(group)
    )


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
    return output_tensor.copy_(all_gather_single(input_tensor, gather_dim, _group(group), tag))


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
    return output.copy_(reduce_scatter_single(input, op, scatter_dim, _group(group), tag))


def all_reduce_inplace(
    tensor: Tensor, op: str = "sum", group: Any = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """tensor, filled by `all_reduce`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    return tensor.copy_(all_reduce(tensor, op, _group(group), tag))


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
    return output.copy_(
        all_to_all_single(input, output_split_sizes, input_split_sizes, _group(group), tag)
    )


def all_gather_inplace(
    tensor_list: Tensors, tensor: Tensor, group: Any = None, async_op: bool = False, tag: str = ""
) -> Tensors:
    """tensor_list, filled by `all_gather`. async_op must be False, as in torch."""
    _refuse_async(async_op)
    _C.all_gather(tensor_list, _whole(tensor), _group(group))
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
    _C.reduce_scatter(output, [_whole(each) for each in input_list], _op(op), _group(group))
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
    """The tensors, once all messages have come and gone: op_list has `isend` and `irecv`, peer_list ranks of the group."""
    members = _group(group_name)
    works = _C.batch_of_messages(
        [
            (op == "isend", tensor, None, members, tag, peer)
            for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True)
        ]
    )
    for work in works:
        work.wait()
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


# The older names.
all_gather_tensor = all_gather_single
all_gather_tensor_autograd = all_gather_single_autograd
all_gather_into_tensor_coalesced = all_gather_single_coalesced
reduce_scatter_tensor = reduce_scatter_single
reduce_scatter_tensor_autograd = reduce_scatter_single_autograd
reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
