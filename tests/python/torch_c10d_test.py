# SPDX-License-Identifier: BSD-3-Clause
"""muster as a backend of stock torch against Gloo, call by call: values, version counters,
refusals, and tensors in every layout.
"""

import datetime
import re

import pytest
import torch
import torch.distributed as dist
from ranks import meeting_file, run_ranks

import muster.torch  # noqa: F401

LIMIT = datetime.timedelta(seconds=60)


def on_ranks(size, body, *arguments, backend="muster"):
    """Runs body(rank, size, ...) between init and destroy."""
    name = meeting_file()

    def rank_body(rank):
        dist.init_process_group(
            backend, store=dist.FileStore(name, size), rank=rank, world_size=size, timeout=LIMIT
        )
        try:
            return body(rank, size, *arguments)
        finally:
            dist.destroy_process_group()

    return run_ranks(size, rank_body)


def as_on_gloo(size, body, *arguments):
    """The body's results, by name, on every rank: the same on both."""
    mine, theirs = (
        on_ranks(size, body, *arguments, backend=backend) for backend in ("muster", "gloo")
    )
    for rank in range(size):
        assert mine[rank].keys() == theirs[rank].keys()
        for name, expected in theirs[rank].items():
            assert mine[rank][name] == expected, f"{name} on rank {rank}"


def mine(rank, *shape, number=0):
    return (
        ((torch.arange(torch.Size(shape).numel()) * 3 + rank * 5 + number * 7) % 11 + 1)
        .float()
        .view(shape)
    )


def turned(rank, *shape):
    """The same values, not contiguous."""
    return mine(rank, *shape).t().contiguous().t()


def listed(value):
    if isinstance(value, torch.Tensor):
        return (value.to_dense() if value.is_sparse else value).tolist()
    return [listed(each) for each in value]


def options(kind, **given):
    made = kind()
    for name, value in given.items():
        setattr(made, name, value)
    return made


def versions(rank, size, make):
    """How far each call moves the version counters of what it is given, by its name."""
    found = {}

    def call(name, body, *written):
        before = [tensor._version for tensor in written]
        body()
        found[name] = [tensor._version - was for tensor, was in zip(written, before)]

    group = dist.group.WORLD
    x, leaf, out = (
        make(rank, 4, 2),
        make(rank, 4, 2).requires_grad_(),
        [make(rank, 4, 2) for _ in range(size)],
    )
    whole = make(rank, 4 * size, 2)
    call("all_reduce", lambda: dist.all_reduce(x), x)
    call("all_reduce, asynchronous", lambda: dist.all_reduce(x, async_op=True).wait(), x)
    call("all_reduce of a leaf", lambda: dist.all_reduce(leaf), leaf)
    call(
        "all_reduce of complex numbers",
        lambda c=torch.view_as_complex(mine(rank, 4, 2)): dist.all_reduce(c),
        x,
    )
    call("broadcast", lambda: dist.broadcast(x, 0), x)
    call("broadcast of a leaf", lambda: dist.broadcast(leaf, 0), leaf)
    call("reduce", lambda: dist.reduce(x, 0), x)
    call("all_gather", lambda: dist.all_gather(out, x), *out)
    call("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(whole, x), whole)
    call("gather", lambda: dist.gather(x, out if rank == 0 else None), *out)
    call("scatter", lambda: dist.scatter(x, out if rank == 0 else None), x)
    call("reduce_scatter", lambda: dist.reduce_scatter(x, out), x)
    call("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(x, whole), x)
    call("all_to_all", lambda: dist.all_to_all(out, [each.clone() for each in out]), *out)
    call("all_reduce_coalesced", lambda: dist.all_reduce_coalesced(out), *out)
    call(
        "allgather_into_tensor_coalesced",
        lambda: group.allgather_into_tensor_coalesced([whole], [x]).wait(),
        whole,
    )
    call(
        "reduce_scatter_tensor_coalesced",
        lambda: group.reduce_scatter_tensor_coalesced([x], [whole]).wait(),
        x,
    )
    call("allreduce of two", lambda: group._get_backend(x.device).allreduce(out[:2]).wait(), *out)
    # Gloo sends and splits contiguous tensors only.
    a, b = mine(rank, size, 2), mine(rank, size, 2)
    call("all_to_all_single", lambda: dist.all_to_all_single(a, b), a)
    call(
        "all_to_all_single, with sizes",
        lambda: dist.all_to_all_single(a, b, [1] * size, [1] * size),
        a,
    )
    call(
        "send and recv",
        lambda: dist.send(a, 1) if rank == 0 else dist.recv(a, 0) if rank == 1 else None,
        a,
    )
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (4,))
    call("all_reduce of a sparse tensor", lambda: dist.all_reduce(sparse), sparse)
    return found


# spec: A2.versions version counters: every call of stock torch's moves them as on Gloo
@pytest.mark.parametrize("make", [mine, turned])
@pytest.mark.parametrize("size", [2, 3])
def test_version_counters(size, make):
    as_on_gloo(size, versions, make)


def redistributed(rank, size):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for name, before, after in [
        ("to a shard", Replicate(), Shard(0)),
        ("to another", Shard(0), Shard(1)),
        ("to all", Shard(1), Replicate()),
    ]:
        for rows in (size, 2 * size + 1):
            whole = distribute_tensor(mine(0, rows, 6).requires_grad_(), mesh, [before])
            moved = whole.redistribute(mesh, [after])
            moved.backward(torch.ones_like(moved))
            found[f"{name}, {rows} rows"] = listed([moved.to_local(), whole.grad.to_local()])
    part = (mine(0, 4).requires_grad_() * 2).split(2)[0]
    dist.all_reduce(part)
    part.sum().backward()
    return found


# spec: A2 autograd: DTensor.redistribute forward and backward, and views of split(), as on Gloo
@pytest.mark.parametrize("size", [2, 3])
def test_redistribute(size):
    as_on_gloo(size, redistributed)


def several(rank, size):
    """Calls with several tensors, as c10d takes them: what they leave in the tensors, and what
    their futures give.
    """
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found = {}

    def call(name, function, written, *rest):
        work = function(written, *rest)
        work.wait()
        found[name] = listed([written, work.get_future().value()])

    def tensors(count, *shape):
        return [mine(rank, *shape, number=number) for number in range(count)]

    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        how = options(dist.AllreduceOptions, reduceOp=getattr(dist.ReduceOp, op))
        call(f"allreduce, {op}", backend.allreduce, tensors(3, 2, 3), how)
    for op in ("BAND", "BOR", "BXOR"):
        how = options(dist.AllreduceOptions, reduceOp=getattr(dist.ReduceOp, op))
        call(f"allreduce, {op}", backend.allreduce, [each.long() for each in tensors(3, 5)], how)
    call("allreduce, one tensor twice", backend.allreduce, [mine(rank, 4)] * 2)
    call("allreduce, two views", backend.allreduce, list(mine(rank, 4).split(2)))
    call(
        "allreduce, sparse",
        backend.allreduce,
        [
            torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,)),
            torch.sparse_coo_tensor([[0, rank]], [5.0, 7.0], (4,)),
        ],
    )
    for root in range(min(size, 2)):
        for tensor in range(2):
            how = options(dist.BroadcastOptions, rootRank=root, rootTensor=tensor)
            call(
                f"broadcast of tensor {tensor} of rank {root}",
                backend.broadcast,
                tensors(2, 3),
                how,
            )
    call(
        "allgather",
        backend.allgather,
        [[torch.empty(2, 2) for _ in range(2 * size)] for _ in range(2)],
        tensors(2, 2, 2),
    )
    return found


# spec: F17 several tensors in one c10d call: values and futures as on Gloo
@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_tensors(size):
    as_on_gloo(size, several)


def several_for_inference(rank, size):
    group, found = dist.group.WORLD, {}
    with torch.inference_mode():
        given = [mine(rank, 2), mine(rank, 3, number=1)]
        group.allreduce_coalesced(given).wait()
        found["allreduce_coalesced"] = listed(given)
        parts = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
        group.allgather_coalesced(parts, given).wait()
        found["allgather_coalesced"] = [listed(each) for each in parts]
        lists = [[torch.empty(2) for _ in range(2 * size)] for _ in range(2)]
        group.allgather(lists, [mine(rank, 2), mine(rank, 2, number=1)]).wait()
        found["allgather"] = [listed(each) for each in lists]
    return found


# spec: F17 several tensors of inference mode: another thread may have to write them
def test_several_tensors_of_inference_mode():
    as_on_gloo(2, several_for_inference)


def average_of_several(rank, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensors = [mine(rank, 3), mine(rank, 3, number=1)]
    backend.allreduce(tensors, options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)).wait()
    sums = sum(mine(r, 3, number=number) for r in range(size) for number in range(2))
    for tensor in tensors:  # Gloo divides the first alone
        torch.testing.assert_close(tensor, sums / size)
    # Refused on every rank: the group goes on.
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="2 tensors were given.*invalid tensor size at index 1"
        ):
            backend.allreduce([mine(rank, 3), mine(rank, 4)])
        dist.barrier()


# spec: F17 several tensors in one c10d call: each gets the average
def test_average_of_several_tensors():
    on_ranks(2, average_of_several)


def refusals(rank, size):
    """The errors of calls that cannot be, by their names."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,))
    x, longer, wide = mine(rank, 3), mine(rank, 4), mine(rank, 3).double()
    kinds = {
        "broadcast": dist.BroadcastOptions,
        "reduce": dist.ReduceOptions,
        "gather": dist.GatherOptions,
        "scatter": dist.ScatterOptions,
    }
    from_0 = {name: options(kind, rootRank=0) for name, kind in kinds.items()}
    many = [x] * size
    by_root = {
        "broadcast": ([x],),
        "reduce": ([x],),
        "gather": ([many], [x]),
        "scatter": ([x], [many]),
    }
    calls, lone = {}, {}  # `lone`: those that one rank alone makes
    for name, arguments in by_root.items():
        for root in (-1, size):
            calls[f"{name} by {root}"] = (name, *arguments, options(kinds[name], rootRank=root))
    for name in ("broadcast", "reduce"):
        for tensor in (-1, 1):
            calls[f"{name} of tensor {tensor}"] = (
                name,
                [x],
                options(kinds[name], rootRank=0, rootTensor=tensor),
            )
        calls[f"{name} of none"] = (name, [], from_0[name])
    for what, other in {"sizes": longer, "types": wide}.items():
        calls[f"allreduce, unlike {what}"] = ("allreduce", [x, other])
        calls[f"broadcast, unlike {what}"] = ("broadcast", [x, other], from_0["broadcast"])
        calls[f"allgather, unlike {what}"] = ("allgather", [many * 2] * 2, [x, other])
        calls[f"allgather, unlike {what} of outputs"] = ("allgather", [[other] * size], [x])
        lone[f"gather, unlike {what}"] = (0, "gather", [[other] * size], [x], from_0["gather"])
        lone[f"scatter, unlike {what}"] = (0, "scatter", [x], [[other] * size], from_0["scatter"])
    calls["allreduce, unlike layouts"] = ("allreduce", [x, sparse])
    calls["allreduce of none"] = ("allreduce", [])
    calls["allreduce of sparse tensors, MAX"] = (
        "allreduce",
        [sparse],
        options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX),
    )
    calls["allreduce_coalesced of none"] = ("allreduce_coalesced", [])
    calls["allreduce_coalesced of sparse tensors"] = ("allreduce_coalesced", [sparse])
    calls["allreduce_coalesced, unlike types"] = ("allreduce_coalesced", [x, x.double()])
    calls["reduce of two"] = ("reduce", [x, x.clone()], from_0["reduce"])
    calls["allgather of none"] = ("allgather", [], [])
    calls["allgather, one list too many"] = ("allgather", [many] * 2, [x])
    calls["allgather, short lists"] = ("allgather", [many] * 2, [x, x])
    calls["allgather_coalesced of none"] = ("allgather_coalesced", [], [])
    calls["allgather_coalesced, a list too few"] = ("allgather_coalesced", [[x]] * (size - 1), [x])
    calls["allgather_coalesced, a tensor too many"] = ("allgather_coalesced", [[x, x]] * size, [x])
    calls["gather of two"] = ("gather", [], [x, x], from_0["gather"])
    calls["scatter into two"] = ("scatter", [x, x], [], from_0["scatter"])
    calls["reduce_scatter into two"] = ("reduce_scatter", [x, x], [many] * 2)
    calls["reduce_scatter, short list"] = ("reduce_scatter", [x], [[x]])
    calls["alltoall, short lists"] = ("alltoall", [x], [x])
    calls["alltoall_base, wrong splits"] = (
        "alltoall_base",
        mine(rank, size),
        mine(rank, size),
        [2] * size,
        [1] * size,
    )
    calls["alltoall_base, uneven"] = (
        "alltoall_base",
        mine(rank, size + 1),
        mine(rank, size + 1),
        [],
        [],
    )
    calls["send of two"] = ("send", [x, x], (rank + 1) % size, 0)
    calls["recv of two"] = ("recv", [x, x], (rank + 1) % size, 0)
    lone["gather without outputs"] = (0, "gather", [], [x], from_0["gather"])
    lone["gather, short list"] = (0, "gather", [[x]], [x], from_0["gather"])
    lone["gather, outputs elsewhere"] = (1, "gather", [many], [x], from_0["gather"])
    lone["scatter without inputs"] = (0, "scatter", [x], [], from_0["scatter"])
    lone["scatter, short list"] = (0, "scatter", [x], [[x]], from_0["scatter"])
    lone["scatter, inputs elsewhere"] = (1, "scatter", [x], [many], from_0["scatter"])
    found = {}

    def refused(name, backend, function, *arguments):
        with pytest.raises(RuntimeError) as caught:
            getattr(backend, function)(*arguments).wait()
        found[name] = str(caught.value).split("\nException raised")[0]

    for name, call in calls.items():
        refused(name, backend, *call)
    dist.barrier()  # what all refuse is over
    for name, (caller, *call) in lone.items():
        group = dist.new_group()
        if rank == caller:
            refused(name, group._get_backend(x.device), *call)
    return found


# spec: F18 refusals in stock torch: our sentence, and the words that torch's own tests look for
def test_refusals():
    mine, theirs = (on_ranks(2, refusals, backend=backend) for backend in ("muster", "gloo"))
    for rank in range(2):
        assert mine[rank].keys() == theirs[rank].keys()
        for name, words in theirs[rank].items():
            said = mine[rank][name]
            assert re.sub(r"at index \d", "", words) in re.sub(r"at index \d", "", said), (
                f"{name} on rank {rank}"
            )
            assert re.match(rf"\w+ on rank {rank} \(group \S+\): \S+ .* \(", said), (
                f"{name} on rank {rank}: {said}"
            )


def in_any_layout(rank, size):
    """Every call on tensors that are not contiguous, against the same on contiguous ones."""
    last, every = size - 1, range(size)
    layouts = {
        "transposed": lambda x: x.t().contiguous().t(),
        "every second column": lambda x: torch.stack([x, x], -1).flatten(1)[:, ::2],
        "between others": lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
    }
    group = dist.group.WORLD
    for name, laid in layouts.items():

        def fresh(rows=2, number=0):
            return laid(mine(rank, rows * 2, 3, number=number))

        def blank(rows=2):
            return laid(torch.zeros(rows * 2, 3))

        def check(call, given, what):
            assert not any(x.is_contiguous() for x in given), name
            plain = [x.clone(memory_format=torch.contiguous_format) for x in given]
            call(*given)
            call(*plain)
            for a, b in zip(given, plain):
                assert torch.equal(a, b), f"{what}, {name}"

        check(lambda x: dist.all_reduce(x), [fresh()], "all_reduce")
        check(
            lambda x: dist.all_reduce(x, async_op=True).wait(),
            [fresh()],
            "all_reduce, asynchronous",
        )
        check(lambda x: dist.broadcast(x, last), [fresh()], "broadcast")
        check(lambda x: dist.reduce(x, last), [fresh()], "reduce")
        check(
            lambda x, *out: dist.all_gather(list(out), x),
            [fresh(), *(blank() for _ in every)],
            "all_gather",
        )
        check(
            lambda x, *out: dist.gather(x, list(out) if rank == last else None, last),
            [fresh(), *(blank() for _ in every)],
            "gather",
        )
        check(
            lambda x, *give: dist.scatter(x, list(give) if rank == 0 else None),
            [blank(), *(fresh(number=n) for n in every)],
            "scatter",
        )
        check(
            lambda x, *give: dist.reduce_scatter(x, list(give)),
            [blank(), *(fresh(number=n) for n in every)],
            "reduce_scatter",
        )
        check(
            lambda x, out: dist.all_gather_into_tensor(out, x),
            [fresh(), blank(2 * size)],
            "all_gather_into_tensor",
        )
        check(
            lambda x, out: dist.all_gather_into_tensor(out, x, async_op=True).wait(),
            [fresh(), blank(2 * size)],
            "the same, asynchronous",
        )
        check(
            lambda x, out: dist.reduce_scatter_tensor(x, out),
            [blank(), fresh(2 * size)],
            "reduce_scatter_tensor",
        )
        check(
            lambda x, out: group.allgather_into_tensor_coalesced([out], [x]).wait(),
            [fresh(), blank(2 * size)],
            "all_gather coalesced",
        )
        check(
            lambda x, out: group.reduce_scatter_tensor_coalesced([x], [out]).wait(),
            [blank(), fresh(2 * size)],
            "reduce_scatter coalesced",
        )
        check(
            lambda x, out: dist.all_to_all_single(out, x),
            [fresh(size), blank(size)],
            "all_to_all_single",
        )
        check(
            lambda *both: dist.all_to_all(list(both[size:]), list(both[:size])),
            [*(fresh(number=n) for n in every), *(blank() for _ in every)],
            "all_to_all",
        )
        check(
            lambda *both: dist.all_reduce_coalesced(list(both)),
            [fresh(), fresh(number=1)],
            "all_reduce_coalesced",
        )
        after, before = (rank + 1) % size, (rank - 1) % size
        check(
            lambda x, out: [
                work.wait() for work in (dist.isend(x, after), dist.irecv(out, before))
            ],
            [fresh(), blank()],
            "messages",
        )


# spec: F4 F5 tensors that are not contiguous, in every call of stock torch's
@pytest.mark.parametrize("size", [2, 3])
def test_any_layout(size):
    on_ranks(size, in_any_layout)


def rows_that_cannot_be_shared(rank, size):
    with pytest.raises(RuntimeError, match="whose 3 rows they cannot share equally"):
        dist.all_gather_into_tensor(torch.zeros(4, 3).t(), mine(rank, 2, 3))
    dist.barrier()


def test_rows_that_cannot_be_shared():
    on_ranks(2, rows_that_cannot_be_shared)
