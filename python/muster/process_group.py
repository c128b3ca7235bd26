# SPDX-License-Identifier: BSD-3-Clause
"""The methods that torch's ProcessGroup and Work have beside those of the extension: a group's
calls as methods.

Calls start at once and give a Work, as torch's do; ranks in them are the group's. A `timeout`, as
an argument or in `opts`, runs from the call's start; None, 0 and less are the group's. A list of
tensors is one call for each of them, but where the coalesced form makes one of all. Importing this
module gives the classes their methods.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._C import ProcessGroup as Group
from ._C import ReduceOp, Work
from .options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

Tensors = Sequence[Tensor]
Limit = datetime.timedelta | None


class _Works:
    """Several calls as one Work."""

    def __init__(self, works: Sequence[Any], outputs: list[Tensor]) -> None:
        self._works, self._outputs = [each for each in works if each is not None], outputs

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)

    def is_success(self) -> bool:
        return all(each.is_success() for each in self._works)

    def wait(self, timeout: Limit = None) -> bool:
        return all([each.wait(timeout) for each in self._works])

    def synchronize(self) -> None:
        self.wait()

    def exception(self) -> str | None:
        return next((text for each in self._works if (text := each.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return -1

    def get_future(self) -> torch.futures.Future:
        whole: torch.futures.Future = torch.futures.Future()
        together = torch.futures.collect_all([each.get_future() for each in self._works])

        def end(done: torch.futures.Future) -> None:
            try:
                for each in done.value():
                    each.value()
                whole.set_result(self._outputs)
            except Exception as error:
                whole.set_exception(error)

        together.add_done_callback(end)
        return whole


def _started(work: Any) -> Any:
    """The Work of a call; of a process that is no member one that has ended."""
    return _Works([], []) if work is None else work


def _together(works: Sequence[Any], outputs: list[Tensor]) -> Any:
    return _started(works[0]) if len(works) == 1 else _Works(works, outputs)


def _own(limit: Limit) -> Limit:
    """Converts torch's timeout: a value <= 0 means the group's default."""
    return None if limit is None or limit <= datetime.timedelta(0) else limit


def _listed(tensors: Tensor | Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduced_with(op: Any, timeout: Limit) -> tuple[ReduceOp, Limit]:
    """Operation and timeout from the second argument: options, or an operation."""
    how, limit = (op, timeout) if isinstance(op, ReduceOp) else (op.reduceOp, op.timeout)
    return how, _own(limit)


def _rooted_at(root: Any, timeout: Limit) -> tuple[int, Limit]:
    rank, limit = (root, timeout) if isinstance(root, int) else (root.rootRank, root.timeout)
    return rank, _own(limit)


def _limit_of(opts: Any, timeout: Limit = None) -> Limit:
    said = opts if opts is None or isinstance(opts, datetime.timedelta) else opts.timeout
    return _own(said if timeout is None else timeout)


def allreduce(
    self: Group,
    tensors: Tensor | Tensors,
    opts: AllreduceOptions | ReduceOp = ReduceOp.SUM,
    timeout: Limit = None,
    *,
    op: ReduceOp | None = None,
) -> Work:
    """`all_reduce`, started: of a tensor, or of several. opts: AllreduceOptions, or a ReduceOp."""
    how, limit = _reduced_with(opts if op is None else op, timeout)
    listed = _listed(tensors)
    return _together(
        [_C.all_reduce(each, how, self, True, timeout=limit) for each in listed], listed
    )


def allreduce_coalesced(
    self: Group, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None
) -> Work:
    """`all_reduce_coalesced`, started: one call of all tensors."""
    how, limit = _reduced_with(opts or AllreduceCoalescedOptions(), None)
    return _started(_C.all_reduce_coalesced(list(tensors), how, self, True, timeout=limit))


def broadcast(
    self: Group,
    tensors: Tensor | Tensors,
    root: BroadcastOptions | int | None = None,
    timeout: Limit = None,
    *,
    opts: BroadcastOptions | None = None,
) -> Work:
    """`broadcast`, started: from a rank of the group. root: that, or BroadcastOptions."""
    source, limit = _rooted_at(opts if root is None else root, timeout)
    listed = _listed(tensors)
    return _together(
        [_C.broadcast(each, None, self, True, source, timeout=limit) for each in listed], listed
    )


def reduce(
    self: Group,
    tensors: Tensor | Tensors,
    root: ReduceOptions | int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    timeout: Limit = None,
    *,
    opts: ReduceOptions | None = None,
) -> Work:
    """`reduce`, started: to a rank of the group. root: that, or ReduceOptions."""
    given = opts if root is None else root
    target, limit = _rooted_at(given, timeout)
    how = op if isinstance(given, int) else given.reduceOp  # type: ignore[union-attr]
    listed = _listed(tensors)
    return _together(
        [_C.reduce(each, None, how, self, True, target, timeout=limit) for each in listed], listed
    )


def allgather(
    self: Group,
    output_tensors: Sequence[Tensors] | Tensors,
    input_tensors: Tensors | Tensor,
    opts: AllgatherOptions | Limit = None,
    *,
    timeout: Limit = None,
) -> Work:
    """`all_gather`, started: a list of outputs and an input, or such of several calls."""
    limit = _limit_of(opts, timeout)
    if isinstance(input_tensors, Tensor):
        return _started(
            _C.all_gather(list(output_tensors), input_tensors, self, True, timeout=limit)
        )
    works = [
        _C.all_gather(list(outputs), each, self, True, timeout=limit)
        for outputs, each in zip(output_tensors, input_tensors)
    ]
    return _together(works, [each for outputs in output_tensors for each in outputs])


def allgather_coalesced(
    self: Group,
    output_lists: Sequence[Tensors],
    input_list: Tensors,
    opts: AllgatherOptions | None = None,
) -> Work:
    """`all_gather_coalesced`, started: output_lists[r] becomes the list of member r."""
    return _started(
        _C.all_gather_coalesced(
            list(output_lists), list(input_list), self, True, timeout=_limit_of(opts)
        )
    )


def _allgather_base(
    self: Group, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
) -> Work:
    """`all_gather_into_tensor`, started."""
    return _started(_C.all_gather_into_tensor(output, input, self, True, timeout=_limit_of(opts)))


def allgather_into_tensor_coalesced(
    self: Group, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
) -> Work:
    """`all_gather_into_tensor` of several tensors, started."""
    limit = _limit_of(opts)
    works = [
        _C.all_gather_into_tensor(output, each, self, True, timeout=limit)
        for output, each in zip(outputs, inputs)
    ]
    return _together(works, list(outputs))


def reduce_scatter(
    self: Group,
    output_tensors: Tensors | Tensor,
    input_tensors: Sequence[Tensors] | Tensors,
    opts: ReduceScatterOptions | ReduceOp = ReduceOp.SUM,
    timeout: Limit = None,
    *,
    op: ReduceOp | None = None,
) -> Work:
    """`reduce_scatter`, started: an output and a list of inputs, or such of several calls."""
    how, limit = _reduced_with(opts if op is None else op, timeout)
    if isinstance(output_tensors, Tensor):
        return _started(
            _C.reduce_scatter(output_tensors, list(input_tensors), how, self, True, timeout=limit)
        )
    works = [
        _C.reduce_scatter(output, list(inputs), how, self, True, timeout=limit)
        for output, inputs in zip(output_tensors, input_tensors)
    ]
    return _together(works, list(output_tensors))


def _reduce_scatter_base(
    self: Group, outputTensor: Tensor, inputTensor: Tensor, opts: ReduceScatterOptions | None = None
) -> Work:
    """`reduce_scatter_tensor`, started."""
    how, limit = _reduced_with(opts or ReduceScatterOptions(), None)
    return _started(
        _C.reduce_scatter_tensor(outputTensor, inputTensor, how, self, True, timeout=limit)
    )


def reduce_scatter_tensor_coalesced(
    self: Group, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions | None = None
) -> Work:
    """`reduce_scatter_tensor` of several tensors, started."""
    how, limit = _reduced_with(opts or ReduceScatterOptions(), None)
    works = [
        _C.reduce_scatter_tensor(output, each, how, self, True, timeout=limit)
        for output, each in zip(outputs, inputs)
    ]
    return _together(works, list(outputs))


def gather(
    self: Group,
    output_tensors: Sequence[Tensors] | Tensors,
    input_tensors: Tensors | Tensor,
    root: GatherOptions | int | None = None,
    timeout: Limit = None,
    *,
    opts: GatherOptions | None = None,
) -> Work:
    """`gather`, started: to a rank of the group; elsewhere the outputs are empty. root: that, or
    GatherOptions.
    """
    target, limit = _rooted_at(opts if root is None else root, timeout)
    is_root = target == self.rank()
    if isinstance(input_tensors, Tensor):
        outputs = list(output_tensors) if is_root else None
        return _started(_C.gather(input_tensors, outputs, None, self, True, target, timeout=limit))
    lists = [list(each) for each in output_tensors] if is_root else [None] * len(input_tensors)
    works = [
        _C.gather(each, outputs, None, self, True, target, timeout=limit)
        for outputs, each in zip(lists, input_tensors)
    ]
    return _together(works, [each for outputs in lists if outputs for each in outputs])


def gather_single(
    self: Group, output: Tensor, input: Tensor, opts: GatherOptions | None = None
) -> Work:
    """`gather` into one tensor, started: the members' tensors in the order of ranks; `output`
    counts on the root alone.
    """
    target, limit = _rooted_at(opts or GatherOptions(rootRank=0), None)
    parts = None
    if target == self.rank():
        parts = list(output.view(self.size(), *input.shape).unbind())
    return _started(_C.gather(input, parts, None, self, True, target, timeout=limit))


def scatter(
    self: Group,
    output_tensors: Tensors | Tensor,
    input_tensors: Sequence[Tensors] | Tensors,
    root: ScatterOptions | int | None = None,
    timeout: Limit = None,
    *,
    opts: ScatterOptions | None = None,
) -> Work:
    """`scatter`, started: from a rank of the group; elsewhere the inputs are empty. root: that, or
    ScatterOptions.
    """
    source, limit = _rooted_at(opts if root is None else root, timeout)
    is_root = source == self.rank()
    if isinstance(output_tensors, Tensor):
        inputs = list(input_tensors) if is_root else None
        return _started(_C.scatter(output_tensors, inputs, None, self, True, source, timeout=limit))
    lists = [list(each) for each in input_tensors] if is_root else [None] * len(output_tensors)
    works = [
        _C.scatter(each, inputs, None, self, True, source, timeout=limit)
        for inputs, each in zip(lists, output_tensors)
    ]
    return _together(works, list(output_tensors))


def alltoall(
    self: Group,
    output_tensors: Tensors,
    input_tensors: Tensors,
    opts: AllToAllOptions | None = None,
) -> Work:
    """`all_to_all`, started."""
    return _started(
        _C.all_to_all(
            list(output_tensors), list(input_tensors), self, True, timeout=_limit_of(opts)
        )
    )


def alltoall_base(
    self: Group,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    opts: AllToAllOptions | Limit = None,
    *,
    timeout: Limit = None,
) -> Work:
    """`all_to_all_single`, started."""
    return _started(
        _C.all_to_all_single(
            output,
            input,
            list(output_split_sizes),
            list(input_split_sizes),
            self,
            True,
            timeout=_limit_of(opts, timeout),
        )
    )


def send(self: Group, tensors: Tensors, dstRank: int, tag: int) -> Work:
    """`isend` to a rank of the group."""
    listed = _listed(tensors)
    return _together([_C.isend(each, None, self, tag, dstRank) for each in listed], listed)


def recv(self: Group, tensors: Tensors, srcRank: int, tag: int) -> Work:
    """`irecv` from a rank of the group."""
    listed = _listed(tensors)
    return _together([_C.irecv(each, None, self, tag, srcRank) for each in listed], listed)


def recv_anysource(self: Group, tensors: Tensors, tag: int) -> Work:
    """`irecv` from any rank."""
    listed = _listed(tensors)
    return _together([_C.irecv(each, None, self, tag) for each in listed], listed)


def barrier(self: Group, opts: BarrierOptions | Limit = None, *, timeout: Limit = None) -> Work:
    """`barrier`, started."""
    return _started(_C.barrier(self, True, None, _limit_of(opts, timeout)))


def monitored_barrier(self: Group, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
    """As the function of that name. Blocks."""
    _C.monitored_barrier(self, timeout, wait_all_ranks)


def set_timeout(self: Group, timeout: datetime.timedelta) -> None:
    """Sets the timeout of later calls that name none."""
    _C.set_timeout(timeout, self)


def abort(self: Group) -> None:
    """Ends what is in flight on it; the other members get an error that names this rank."""
    _C.abort_process_group(self)


def shutdown(self: Group) -> None:
    """The orderly end, as `destroy_process_group`: every member calls it. That of the default group
    ends the others too.
    """
    _C.destroy_process_group(self)


def split_group(
    self: Group,
    ranks: Sequence[int],
    timeout: Limit = None,
    opts: object = None,
    group_name: str | None = None,
    group_desc: str | None = None,
) -> Group | None:
    """A group of some of this one's ranks. Every member calls it with the list that it is in
    itself, or with an empty one; None for that. group_name is taken for torch's sake.
    """
    wanted = sorted({tuple(each) for each in _gathered(self, tuple(ranks)) if each})
    made = _C.split_group(
        parent_pg=self,
        split_ranks=[list(each) for each in wanted],
        timeout=timeout,
        pg_options=opts,
        group_desc=group_desc,
    )
    return made or None


def _gathered(group: Group, value: Any) -> list[Any]:
    from .objects import all_gather_object

    values = [None] * group.size()
    all_gather_object(values, value, group)
    return values


def _get_backend_name(self: Group) -> str:
    """As `name()`."""
    return self.name()


def _start_coalescing(self: Group, device_type: torch.device | None = None) -> None:
    """Accepted for torch's sake: calls start one after another and travel together."""


def _end_coalescing(self: Group, device_type: torch.device | None = None) -> Any:
    """A Work that has ended: each call between has its own."""
    return _Works([], [])


def _wait_for_pending_works(self: Group) -> None:
    """Returns once this member's calls so far have ended: a barrier, which every member makes."""
    _C.barrier(self)


def block_current_stream(self: Work) -> None:
    """As `synchronize`: results are in the tensors when it returns."""
    self.synchronize()


def get_future_result(self: Work) -> torch.futures.Future:
    """A future of 0 (torch's WorkResult.SUCCESS), or of 2 (COMM_ERROR) where the operation has
    failed.
    """
    ended: torch.futures.Future = torch.futures.Future()

    def end(done: torch.futures.Future) -> None:
        try:
            done.value()
            ended.set_result(0)
        except Exception:
            ended.set_result(2)

    self.get_future().add_done_callback(end)
    return ended


_METHODS_OF_GROUPS = (
    allreduce,
    allreduce_coalesced,
    broadcast,
    reduce,
    allgather,
    allgather_coalesced,
    _allgather_base,
    allgather_into_tensor_coalesced,
    reduce_scatter,
    _reduce_scatter_base,
    reduce_scatter_tensor_coalesced,
    gather,
    gather_single,
    scatter,
    alltoall,
    alltoall_base,
    send,
    recv,
    recv_anysource,
    barrier,
    monitored_barrier,
    set_timeout,
    abort,
    shutdown,
    split_group,
    _get_backend_name,
    _start_coalescing,
    _end_coalescing,
    _wait_for_pending_works,
)
_OTHER_NAMES_OF_GROUPS = {
    "all_gather_single": _allgather_base,
    "all_gather_single_coalesced": allgather_into_tensor_coalesced,
    "reduce_scatter_single": _reduce_scatter_base,
    "reduce_scatter_single_coalesced": reduce_scatter_tensor_coalesced,
    "gather_into_tensor": gather_single,
    "all_to_all_single": alltoall_base,
    "supports_completion_hooks": property(lambda self: False),
    "supports_reconfigure": property(lambda self: False),
    "supports_window": property(lambda self: False),
    "_device_types": property(lambda self: [torch.device(kind) for kind in _kinds_of(self)]),
}


def _kinds_of(group: Group) -> list[str]:
    name = group.name()
    return [each.partition(":")[0] for each in name.split(",")] if ":" in name else ["cpu"]


for _method in _METHODS_OF_GROUPS:
    setattr(Group, _method.__name__, _method)
for _name, _value in _OTHER_NAMES_OF_GROUPS.items():
    setattr(Group, _name, _value)
for _kind in (Work, _Works):
    setattr(_kind, "block_current_stream", block_current_stream)
    setattr(_kind, "get_future_result", get_future_result)
