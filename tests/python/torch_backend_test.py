# SPDX-License-Identifier: BSD-3-Clause
"""muster as a backend of stock torch: every collective against what it must give, and groups."""

import pytest
import torch
import torch.distributed as dist
from ranks import meeting_file, run_ranks
from stock_ranks import mine, on_ranks, same, start, total

import muster.torch

SIZES = [1, 2, 3]


def all_collectives(rank, size):
    me, whole = mine(rank, 4, 3), total(size, 4, 3)
    last = size - 1

    x = me.clone()
    dist.all_reduce(x)
    same(x, whole)
    x = me.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    same(x, torch.stack([mine(r, 4, 3) for r in range(size)]).amax(0))
    x = me.clone()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(x, whole / size)
    x = me.t().clone(memory_format=torch.preserve_format)  # not contiguous
    dist.all_reduce(x)
    same(x, whole.t())
    x = mine(rank, 5, dtype=torch.int64)
    dist.all_reduce(x, op=dist.ReduceOp.BXOR)
    expected = mine(0, 5, dtype=torch.int64)
    for r in range(1, size):
        expected ^= mine(r, 5, dtype=torch.int64)
    same(x, expected)

    x = me.clone()
    dist.broadcast(x, src=last)
    same(x, mine(last, 4, 3))
    x = me.clone()
    dist.reduce(x, dst=last)
    same(x, whole if rank == last else me)

    out = [torch.empty(4, 3) for _ in range(size)]
    dist.all_gather(out, me)
    for r in range(size):
        same(out[r], mine(r, 4, 3))
    out = torch.empty(4 * size, 3)
    dist.all_gather_into_tensor(out, me)
    same(out, torch.cat([mine(r, 4, 3) for r in range(size)]))
    out = torch.empty(size, 4, 3)
    dist.all_gather_into_tensor(out, me)
    same(out, torch.stack([mine(r, 4, 3) for r in range(size)]))

    out = [torch.empty(4, 3) for _ in range(size)] if rank == last else None
    dist.gather(me, out, dst=last)
    if rank == last:
        for r in range(size):
            same(out[r], mine(r, 4, 3))
    out = torch.empty(4, 3)
    dist.scatter(out, [mine(r, 4, 3) + 1 for r in range(size)] if rank == 0 else None, src=0)
    same(out, me + 1)

    out = torch.empty(4, 3)
    dist.reduce_scatter(out, [mine(rank + r, 4, 3) for r in range(size)])
    same(out, sum(mine(r + rank, 4, 3) for r in range(size)))
    out = torch.empty(2, 3)
    dist.reduce_scatter_tensor(out, mine(rank, 2 * size, 3))
    same(out, total(size, 2 * size, 3)[2 * rank : 2 * rank + 2])

    out = torch.empty(size * 2)
    dist.all_to_all_single(out, torch.arange(size * 2.0) + 100 * rank)
    same(
        out, torch.cat([torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100 * r for r in range(size)])
    )
    # rank r gives r + d + 1 rows to rank d
    give, take = [rank + d + 1 for d in range(size)], [r + rank + 1 for r in range(size)]
    out = torch.empty(sum(take), 2)
    dist.all_to_all_single(out, torch.full((sum(give), 2), float(rank)), take, give)
    same(out, torch.cat([torch.full((r + rank + 1, 2), float(r)) for r in range(size)]))
    outs = [torch.empty(n) for n in take]
    dist.all_to_all(outs, [torch.full((n,), rank + d / 10) for d, n in enumerate(give)])
    for r in range(size):
        same(outs[r], torch.full((r + rank + 1,), r + rank / 10))
    dist.barrier()


# spec: A2 every collective in stock torch, on 1, 2 and 3 processes
@pytest.mark.parametrize("size", SIZES)
def test_collectives(size):
    on_ranks(size, all_collectives)


def coalesced(rank, size):
    tensors = [mine(rank, 3), mine(rank, 2, 2)]
    dist.all_reduce_coalesced(tensors)
    same(tensors[0], total(size, 3))
    same(tensors[1], total(size, 2, 2))

    with dist._coalescing_manager(async_ops=True) as manager:
        a, b = mine(rank, 3), mine(rank, 5)
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    same(a, total(size, 3))
    same(b, total(size, 5))

    group = dist.group.WORLD
    outs = [torch.empty(3 * size), torch.empty(2 * size, dtype=torch.int64)]
    group.allgather_into_tensor_coalesced(
        outs, [mine(rank, 3), mine(rank, 2, dtype=torch.int64)]
    ).wait()
    same(outs[0], torch.cat([mine(r, 3) for r in range(size)]))
    same(outs[1], torch.cat([mine(r, 2, dtype=torch.int64) for r in range(size)]))
    outs = [torch.empty(3), torch.empty(2, dtype=torch.int64)]
    group.reduce_scatter_tensor_coalesced(
        outs, [mine(rank, 3 * size), mine(rank, 2 * size, dtype=torch.int64)]
    ).wait()
    same(outs[0], total(size, 3 * size)[3 * rank : 3 * rank + 3])
    same(outs[1], total(size, 2 * size, dtype=torch.int64)[2 * rank : 2 * rank + 2])

    import torch.distributed._functional_collectives as functional

    same(functional.all_reduce(mine(rank, 4), "sum", group), total(size, 4))
    same(
        functional.all_gather_tensor(mine(rank, 4), 0, group),
        torch.cat([mine(r, 4) for r in range(size)]),
    )
    same(
        functional.reduce_scatter_tensor(mine(rank, 2 * size), "sum", 0, group),
        total(size, 2 * size)[2 * rank : 2 * rank + 2],
    )


# spec: F17 coalesced forms in stock torch
@pytest.mark.parametrize("size", SIZES)
def test_coalesced_and_functional(size):
    on_ranks(size, coalesced)


def works_and_futures(rank, size):
    x = mine(rank, 1000)
    work = dist.all_reduce(x, async_op=True)
    tripled = work.get_future().then(lambda future: future.value()[0] * 3)
    assert work.wait()
    assert work.is_completed()
    same(x, total(size, 1000))
    same(tripled.wait(), total(size, 1000) * 3)
    same(work.result()[0], x)
    before = dist.group.WORLD._get_sequence_number_for_group()
    dist.barrier()
    assert dist.group.WORLD._get_sequence_number_for_group() == before + 1
    sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,))
    dist.all_reduce(sparse)
    dense = torch.zeros(4)
    for r in range(size):
        dense[r] += 1
        dense[3] += 2
    same(sparse.to_dense(), dense)


# spec: E3 get_future in stock torch, F22 sparse
@pytest.mark.parametrize("size", SIZES)
def test_works_and_futures(size):
    on_ranks(size, works_and_futures)


def futures_after_waits(rank, size):
    before, done = dist.all_reduce(torch.ones(2), async_op=True), []

    def hook(_):
        within = dist.all_reduce(torch.ones(2), async_op=True)
        within.get_future()
        before.wait()
        future = before.get_future()
        done.append(future.done() and future.value()[0].tolist())
        within.wait()

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert done == [[2, 2]]


# spec: E3 a future taken after wait has its value, in a backward pass too, as DDP reads it
def test_futures_after_waits():
    on_ranks(2, futures_after_waits)


def point_to_point(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(4)
    sending = dist.isend(mine(rank, 4), after, tag=3)
    assert dist.recv(got, before, tag=3) == before
    sending.wait()
    same(got, mine(before, 4))

    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            source = dist.recv(got, tag=9)
            same(got, mine(source, 4))
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(mine(rank, 4), 0, tag=9)

    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(rank, 4), after), dist.P2POp(dist.irecv, got, before)]
    ):
        work.wait()
    same(got, mine(before, 4))

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    given = [{"a": 1}, "two"] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, src=0)
    assert given == [{"a": 1}, "two"]


# spec: E1 E2 E5 messages in stock torch, G1 object collectives in stock torch
@pytest.mark.parametrize("size", [2, 3])
def test_point_to_point(size):
    on_ranks(size, point_to_point)


def groups(rank, size):
    for _ in range(3):
        pair = dist.new_group([0, 2])
        if rank in (0, 2):
            x = mine(rank, 3)
            dist.all_reduce(x, group=pair)
            same(x, mine(0, 3) + mine(2, 3))
            got = torch.empty(3)
            if rank == 2:
                dist.send(mine(rank, 3), 0, group=pair)
            else:
                assert dist.recv(got, group=pair) == 2
                same(got, mine(2, 3))
            dist.destroy_process_group(pair)
    # In another order on every rank, and not by all.
    one, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    if rank == 0:
        dist.destroy_process_group(one)
        dist.destroy_process_group(two)
    if rank == 1:
        dist.destroy_process_group(two)
        dist.destroy_process_group(one)

    mesh = dist.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    x = mine(rank, 3)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    same(x, total(size, 3))

    part = dist.split_group(split_ranks=[[0, 1], [2]])
    x = mine(rank, 3)
    dist.all_reduce(x, group=part)
    same(x, mine(0, 3) + mine(1, 3) if rank < 2 else mine(2, 3))


# spec: D1 new_group in stock torch, D5 init_device_mesh in stock torch, D7 split_group in stock
# torch
def test_groups():
    on_ranks(3, groups)


def test_init_after_destroy():
    name = meeting_file()

    def body(rank):
        for turn in range(3):
            start(rank, 2, name + str(turn))
            x = torch.ones(2) * turn
            dist.all_reduce(x)
            same(x, torch.ones(2) * 2 * turn)
            dist.destroy_process_group()

    run_ranks(2, body)


def test_group_beside_gloo():
    def body(rank, size):
        group = dist.new_group([0, 1], backend="muster")
        x = mine(rank, 3)
        dist.all_reduce(x, group=group)
        same(x, total(size, 3))
        dist.all_reduce(x)  # gloo's

    on_ranks(2, body, backend="gloo")


def test_replaces_gloo():
    def body(rank):
        muster.torch.replace_gloo()
        start(rank, 2, name, backend="gloo")
        assert dist.get_backend() == "gloo"
        same_as_muster = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert not isinstance(same_as_muster, torch._C._distributed_c10d.ProcessGroupGloo)
        assert dist.ProcessGroupGloo is muster.torch.ProcessGroupMuster and isinstance(
            same_as_muster, dist.ProcessGroupGloo
        )
        all_collectives(rank, 2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        logged = model._get_ddp_logging_data()
        assert (
            logged["backend_name"] == "gloo"
            and logged["gloo_num_threads"] == 2
            and logged["world_size"] == 2
        )
        dist.destroy_process_group()

    name = meeting_file()
    run_ranks(2, body)
