# SPDX-License-Identifier: BSD-3-Clause
"""A call's own timeout, which the group's leaves alone: of the collectives as functions, and of the
methods of ProcessGroup by argument and by options.
"""

import contextlib
import datetime
import inspect
import re

import pytest
import torch
from thread_ranks import on_threads

import muster as dist
from muster import distributed_c10d as c10d

SHORT = datetime.timedelta(milliseconds=60)
BACKENDS_OWN = datetime.timedelta(milliseconds=-1)  # how torch's options say "the group's"


def one():
    return torch.ones(1)


def two():
    return torch.ones(2)


def ones():
    return [torch.ones(1), torch.ones(1)]


def waits_for_rank_1(**more):
    """The calls of rank 0 in a group of two, none of which can end without rank 1."""
    functions = {
        "broadcast": lambda how: dist.broadcast(one(), 1, **how),
        "reduce": lambda how: dist.reduce(one(), 0, **how),
        "gather": lambda how: dist.gather(one(), ones(), 0, **how),
        "scatter": lambda how: dist.scatter(one(), None, 1, **how),
        "all_reduce": lambda how: dist.all_reduce(one(), **how),
        "all_reduce_coalesced": lambda how: dist.all_reduce_coalesced(ones(), **how),
        "reduce_scatter": lambda how: dist.reduce_scatter(one(), ones(), **how),
        "reduce_scatter_tensor": lambda how: dist.reduce_scatter_tensor(one(), two(), **how),
        "reduce_scatter_coalesced": lambda how: dist.reduce_scatter_coalesced(
            [one()], [[one()], [one()]], **how
        ),
        "all_gather": lambda how: dist.all_gather(ones(), one(), **how),
        "all_gather_into_tensor": lambda how: dist.all_gather_into_tensor(two(), one(), **how),
        "all_gather_coalesced": lambda how: dist.all_gather_coalesced(
            [[one()], [one()]], [one()], **how
        ),
        "all_to_all_single": lambda how: dist.all_to_all_single(two(), two(), **how),
        "all_to_all": lambda how: dist.all_to_all(ones(), ones(), **how),
        "barrier": lambda how: dist.barrier(**how),
        "gather_into_tensor": lambda how: dist.gather_into_tensor(one(), two(), 0, **how),
    }
    return {name: (lambda call=call: call(more)) for name, call in functions.items()}


def methods_told(group, limit):
    """The same of the methods, by options."""

    def of(kind, **more):
        return kind(**more, timeout=limit)

    return {
        "allreduce": lambda: group.allreduce(one(), of(c10d.AllreduceOptions)),
        "allreduce of two": lambda: group.allreduce(ones(), of(c10d.AllreduceOptions)),
        "allreduce_coalesced": lambda: group.allreduce_coalesced(
            ones(), of(c10d.AllreduceCoalescedOptions)
        ),
        "broadcast": lambda: group.broadcast(one(), of(c10d.BroadcastOptions, rootRank=1)),
        "reduce": lambda: group.reduce(one(), of(c10d.ReduceOptions)),
        "allgather": lambda: group.allgather([ones()], [one()], of(c10d.AllgatherOptions)),
        "allgather of a tensor": lambda: group.allgather(ones(), one(), timeout=limit),
        "allgather_coalesced": lambda: group.allgather_coalesced(
            [[one()], [one()]], [one()], of(c10d.AllgatherOptions)
        ),
        "_allgather_base": lambda: group._allgather_base(two(), one(), of(c10d.AllgatherOptions)),
        "allgather_into_tensor_coalesced": lambda: group.allgather_into_tensor_coalesced(
            [two()], [one()], of(c10d.AllgatherOptions)
        ),
        "reduce_scatter": lambda: group.reduce_scatter(
            [one()], [ones()], of(c10d.ReduceScatterOptions)
        ),
        "_reduce_scatter_base": lambda: group._reduce_scatter_base(
            one(), two(), of(c10d.ReduceScatterOptions)
        ),
        "reduce_scatter_tensor_coalesced": lambda: group.reduce_scatter_tensor_coalesced(
            [one()], [two()], of(c10d.ReduceScatterOptions)
        ),
        "gather": lambda: group.gather([ones()], [one()], of(c10d.GatherOptions, rootRank=0)),
        "gather_single": lambda: group.gather_single(
            two(), one(), of(c10d.GatherOptions, rootRank=0)
        ),
        "scatter": lambda: group.scatter([one()], [], of(c10d.ScatterOptions, rootRank=1)),
        "alltoall": lambda: group.alltoall(ones(), ones(), of(c10d.AllToAllOptions)),
        "alltoall_base": lambda: group.alltoall_base(
            two(), two(), [], [], of(c10d.AllToAllOptions)
        ),
        "barrier": lambda: group.barrier(of(c10d.BarrierOptions)),
        "allreduce by argument": lambda: group.allreduce(one(), dist.ReduceOp.SUM, limit),
        "broadcast by argument": lambda: group.broadcast(one(), 1, limit),
        "reduce by argument": lambda: group.reduce(one(), 0, dist.ReduceOp.SUM, limit),
        "gather by argument": lambda: group.gather(ones(), one(), 0, limit),
        "scatter by argument": lambda: group.scatter(one(), [], 1, limit),
        "barrier by argument": lambda: group.barrier(timeout=limit),
    }


def times_out(call):
    with pytest.raises(dist.DistBackendError, match=r"waited [\d.]+ m?s") as caught:
        call()
    assert caught.value.code == "timed out" and caught.value.ranks == [1]


@contextlib.contextmanager
def group_that_fails():
    """A group of two, whose rank 1 makes no call and learns of the failure at its end."""
    group = dist.new_group()
    yield group
    dist.barrier()
    with contextlib.suppress(dist.DistBackendError):
        dist.destroy_process_group(group)


# spec: F1 a collective's own timeout in Python, and that of its options
@pytest.mark.parametrize("name", waits_for_rank_1())
def test_timeout_of_a_function(name):
    def body(rank, size):
        for asynchronous in (False, True):
            with group_that_fails() as group:
                how = {"group": group, "async_op": asynchronous, "timeout": SHORT}
                call = waits_for_rank_1(**how)[name]
                if rank == 0:
                    times_out((lambda: call().wait()) if asynchronous else call)

    on_threads(2, body)


# spec: U2 the options' timeout is honoured by every method of ProcessGroup
@pytest.mark.parametrize("name", methods_told(None, SHORT))
def test_timeout_of_a_method(name):
    def body(rank, size):
        with group_that_fails() as group:
            if rank == 0:
                work = methods_told(group, SHORT)[name]()
                times_out(work.wait)
                assert work.is_completed() and not work.is_success()
                assert "waited" in work.exception()
                assert work.get_future_result().wait() == 2

    on_threads(2, body)


# spec: U2 options without a timeout of their own have the group's
@pytest.mark.parametrize("limit", [None, BACKENDS_OWN, datetime.timedelta(0)])
def test_the_groups_timeout(limit):
    def body(rank, size):
        with group_that_fails() as group:
            group.set_timeout(SHORT)
            if rank == 0:
                how = {} if limit is None else {"timeout": limit}
                work = group.allreduce(one(), c10d.AllreduceOptions(**how))
                times_out(work.wait)

    on_threads(2, body)


# spec: F1 a call's own timeout may be longer than the group's
def test_a_longer_timeout():
    def body(rank, size):
        group = dist.new_group()
        long = group.timeout
        group.set_timeout(SHORT)
        with group_that_fails() as other:  # rank 1 leaves it once SHORT has passed
            if rank == 0:
                work = dist.all_reduce(one(), group=group, async_op=True, timeout=long)
                times_out(lambda: dist.barrier(other, timeout=SHORT))
        if rank == 0:
            assert work.wait()
        else:
            dist.all_reduce(one(), group=group, timeout=long)

    on_threads(2, body)


# spec: F1 the timeout comes by name: arguments by position are torch's
@pytest.mark.parametrize("name", sorted(set(waits_for_rank_1()) - {"barrier"}))
def test_timeout_comes_by_name(name):
    signature = getattr(dist, name).__doc__.splitlines()[0]
    if inspect.isfunction(getattr(dist, name)):
        signature = str(inspect.signature(getattr(dist, name)))
    assert re.search(r"\*, timeout: .* = None\)", signature), signature
