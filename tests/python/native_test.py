# SPDX-License-Identifier: BSD-3-Clause
"""The engine itself, from Python: every operation on it, ranks that are missing at the start, calls
that differ, sparse tensors.
"""

import datetime

import pytest
import torch
from ranks import meeting_file
from thread_ranks import on_threads, row, same

import muster as dist


# spec: B1 init_process_group throws at the timeout, naming the ranks that did not come
def test_missing_ranks_are_named():
    with pytest.raises(dist.DistError, match="ranks? 1.*2") as caught:
        dist.init_process_group(
            "native",
            init_method="file://" + meeting_file(),
            rank=0,
            world_size=3,
            timeout=datetime.timedelta(seconds=0.5),
        )
    assert caught.value.ranks == [1, 2]
    assert not dist.is_initialized()


OPERATIONS = {
    "broadcast": lambda x, n, me: dist.broadcast(x, 0) or x,
    "all_reduce": lambda x, n, me: dist.all_reduce(x) or x,
    "all_reduce_coalesced": lambda x, n, me: dist.all_reduce_coalesced([x]) or x,
    "reduce": lambda x, n, me: dist.reduce(x, 0) or (x if me == 0 else row(0) + row(1)),
    "all_gather": lambda x, n, me: gathered(dist.all_gather, x, n),
    "all_gather_into_tensor": lambda x, n, me: into(dist.all_gather_into_tensor, n * 4, x),
    "gather": lambda x, n, me: gathered(dist.gather, x, n) if me == 0 else dist.gather(x, dst=0),
    "scatter": lambda x, n, me: into(dist.scatter, 4, [x, x + 1] if me == 0 else None),
    "reduce_scatter": lambda x, n, me: into(dist.reduce_scatter, 4, [x, x]),
    "reduce_scatter_tensor": lambda x, n, me: into(dist.reduce_scatter_tensor, 2, x),
    "all_to_all_single": lambda x, n, me: into(dist.all_to_all_single, 4, x),
    "barrier": lambda x, n, me: dist.barrier(),
    "batch_isend_irecv": lambda x, n, me: exchanged(x, 1 - me),
    "send": lambda x, n, me: dist.send(x, 1) if me == 0 else into(dist.recv, 4, 0),
    "all_gather_object": lambda x, n, me: objects(n, me),
    "monitored_barrier": lambda x, n, me: dist.monitored_barrier(),
}


def into(call, length, *given):
    out = torch.zeros(length, dtype=torch.int64)
    call(out, *given)
    return out


def gathered(call, x, n):
    out = [torch.zeros_like(x) for _ in range(n)]
    if call is dist.gather:
        call(x, out)
    else:
        call(out, x)
    return torch.cat(out)


def exchanged(x, peer):
    got = torch.zeros_like(x)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    ):
        work.wait()
    return got


def objects(n, me):
    found = [None] * n
    dist.all_gather_object(found, {"rank": me})
    return torch.tensor([each["rank"] for each in found])


BOTH = row(0) + row(1)
ALL = torch.cat([row(0), row(1)])
RESULTS = {
    "broadcast": [row(0)] * 2,
    "all_reduce": [BOTH] * 2,
    "all_reduce_coalesced": [BOTH] * 2,
    "reduce": [BOTH] * 2,
    "all_gather": [ALL] * 2,
    "all_gather_into_tensor": [ALL] * 2,
    "gather": [ALL, None],
    "scatter": [row(0), row(0) + 1],
    "reduce_scatter": [BOTH] * 2,
    "reduce_scatter_tensor": [BOTH[:2], BOTH[2:]],
    "all_to_all_single": [torch.tensor([0, 1, 10, 11]), torch.tensor([2, 3, 12, 13])],
    "barrier": [None] * 2,
    "batch_isend_irecv": [row(1), row(0)],
    "send": [None, row(0)],
    "all_gather_object": [torch.tensor([0, 1])] * 2,
    "monitored_barrier": [None] * 2,
}


# spec: A2.cpu native has every operation on CPU tensors
@pytest.mark.parametrize("name", OPERATIONS)
def test_native_has(name):
    def body(rank, size):
        assert dist.get_backend() == "native"
        given = OPERATIONS[name](row(rank), size, rank)
        expected = RESULTS[name][rank]
        assert given is None if expected is None else torch.equal(given, expected), given

    on_threads(2, body, backend="native")


# spec: F18 different calls, and the same with another dtype, root or size, are named on every rank
@pytest.mark.parametrize(
    ("mine", "yours", "what"),
    [
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.broadcast(torch.ones(4), 0),
            "broadcast.*all_reduce|all_reduce.*broadcast",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64)),
            "int64.*float32|float32.*int64",
        ),
        (
            lambda: dist.broadcast(torch.ones(4), 0),
            lambda: dist.broadcast(torch.ones(4), 1),
            "root|src",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(5)),
            "4.*5|5.*4",
        ),
    ],
)
def test_different_calls_are_named(mine, yours, what):
    def body(rank, size):
        with pytest.raises(dist.DistError, match=what):
            (mine if rank == 0 else yours)()
            dist.barrier()  # who has returned already learns it now

    on_threads(2, body)


# spec: F22 sparse tensors
def test_sparse_all_reduce():
    def body(rank, size):
        sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
        dist.all_reduce(sparse)
        same(sparse.to_dense(), torch.tensor([1.0, 1.0, 0.0, 4.0, 0.0]))

    on_threads(2, body)
