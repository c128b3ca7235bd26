# SPDX-License-Identifier: BSD-3-Clause
"""muster as a backend of stock torch: every collective against what it must give, and how failures
show.
"""

import datetime
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import LIMIT_S, meeting_file, run_ranks

import muster.torch

SIZES = [1, 2, 3]


def start(rank, size, name, backend="muster", seconds=60):
    dist.init_process_group(
        backend,
        store=dist.FileStore(name, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def on_ranks(size, body, *arguments, **options):
    """Runs body(rank, size, ...) between init and destroy."""
    name = meeting_file()

    def rank_body(rank):
        start(rank, size, name, **options)
        try:
            return body(rank, size, *arguments)
        finally:
            dist.destroy_process_group()

    return run_ranks(size, rank_body)


def mine(rank, *shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 3 + rank * 5) % 7 + 1).to(dtype).view(shape)


def total(size, *shape, dtype=torch.float32):
    return sum(mine(rank, *shape, dtype=dtype) for rank in range(size))


def same(actual, expected):
    assert torch.equal(actual, expected), f"{actual}\nis not\n{expected}"


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


# spec: H1 monitored_barrier in stock torch
def test_monitored_barrier():
    def body(rank, size):
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
        if rank == 0:
            with pytest.raises(
                dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier in 500 ms"
            ):
                dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=500))
        dist.barrier()

    on_ranks(2, body)


# spec: H1 monitored_barrier in stock torch: those who came say so in torch's words, and a timeout
# of nothing is one
def test_monitored_barrier_says_what_torch_says():
    def body(rank, size):
        if rank == 0:
            with pytest.raises(
                dist.DistBackendError, match="Rank 0 timed out in monitoredBarrier after 0 ms"
            ):
                dist.group.WORLD.monitored_barrier(datetime.timedelta(0))
        dist.barrier()
        if rank != 1:
            came = (
                "Rank 1 failed to pass"
                if rank == 0
                else "Rank 2 successfully reached monitoredBarrier.*Rank 1 failed to pass"
            )
            with pytest.raises(dist.DistBackendError, match=f"(?s){came}"):
                dist.monitored_barrier(timeout=datetime.timedelta(seconds=60 if rank else 0.5))
        dist.barrier()

    on_ranks(3, body)


# spec: H9 a range in torch's profilers in stock torch, named as torch's own backends name theirs
def test_profiler_shows_calls():
    def body(rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        with torch.autograd.profiler.profile(record_shapes=True) as profiler:
            dist.all_reduce(torch.ones(3, 2))
            dist.all_reduce(torch.ones(4), async_op=True).wait()
            sending = dist.isend(torch.ones(5), after)
            dist.recv(torch.ones(5), before)
            sending.wait()
        shown = [event for event in profiler.function_events if event.name.startswith("muster:")]
        assert sorted((event.name, event.input_shapes) for event in shown) == [
            ("muster:all_reduce", [[3, 2]]),
            ("muster:all_reduce", [[4]]),
            ("muster:recv", [[5]]),
            ("muster:send", [[5]]),
        ]
        assert all(event.is_async for event in shown)

    on_ranks(2, body)


# spec: H7 a timeout in stock torch is a DistBackendError worded as those of torch's own backends
def test_timeout_says_so():
    def body(rank, size):
        group = dist.new_group(timeout=datetime.timedelta(seconds=5))
        if rank == 0:
            with pytest.raises(
                dist.DistBackendError, match="Timed out waiting: .*rank 1 has not entered"
            ):
                dist.barrier(group)
        dist.barrier()

    on_ranks(2, body)


# spec: F18 different calls in stock torch
def test_different_calls_are_named():
    def body(rank, size):
        with pytest.raises(
            dist.DistBackendError, match="broadcast.*all_reduce|all_reduce.*broadcast"
        ):
            if rank == 0:
                dist.all_reduce(torch.ones(4))
            else:
                dist.broadcast(torch.ones(4), src=0)
            dist.barrier()

    on_ranks(2, body)


# spec: H7 a killed rank is named by torch's DistBackendError
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_rank_is_named(asynchronous):
    name = meeting_file()

    def body(rank):
        start(rank, 3, name)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            work = dist.all_reduce(torch.ones(10), async_op=asynchronous)
            if asynchronous:
                work.wait()
        dist.destroy_process_group()

    run_ranks(3, body, killed=(1,))


# spec: B1 the missing rank is named at the timeout, in one sentence without torch's backtrace
@pytest.mark.parametrize("rank", [0, 1])
def test_missing_rank_is_named(rank):
    def body(_):
        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        with pytest.raises(
            dist.DistStoreError, match=f"rank {1 - rank} did not come within"
        ) as caught:
            dist.init_process_group(
                "muster",
                store=server,
                rank=rank,
                world_size=2,
                timeout=datetime.timedelta(seconds=1),
            )
        assert "frame #" not in str(caught.value)

    run_ranks(1, body)


def summed(rank, group=None):
    x = torch.tensor([float(1 << rank)])
    dist.all_reduce(x, group=group)
    return int(x.item())


# spec: D7 shrink_group in stock torch: the new default group's ranks are numbered anew, groups and
# models are made on it
@pytest.mark.parametrize("backend", ["muster", "cpu:muster"])
def test_shrink_group(backend):
    name = meeting_file()

    def body(rank):
        start(rank, 4, name, backend)
        odd = dist.new_group([1, 3])
        dist.barrier()
        if rank == 1:
            with pytest.raises(dist.DistBackendError, match="shrunk"):
                dist.barrier()
            dist.destroy_process_group()
            return
        left = dist.shrink_group([1])
        assert left is dist.group.WORLD and left.size() == 3
        now = [0, 2, 3].index(rank)
        assert dist.get_rank() == now and dist.get_world_size() == 3
        assert summed(rank) == 0b1101
        if rank == 3:
            with pytest.raises(ValueError):
                dist.all_reduce(torch.ones(1), group=odd)
        pair = dist.new_group([0, 2])
        if now != 1:
            assert summed(rank, pair) == 0b1001
        x = torch.full((1,), float(now))
        dist.broadcast(x, src=2)
        assert x.item() == 2
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3) * rank).sum().backward()
        all_of_it = dist.new_group()
        if now == 0:
            dist.destroy_process_group()
            return
        smaller = dist.shrink_group([0], group=all_of_it)
        assert smaller.size() == 2 and smaller.rank() == now - 1
        assert summed(rank, smaller) == 0b1100
        dist.destroy_process_group()

    run_ranks(4, body)


# spec: D7 shrink_group in stock torch after deaths, also of a rank that it was not told of
@pytest.mark.parametrize(
    "flags", [dist.distributed_c10d.SHRINK_DEFAULT, dist.distributed_c10d.SHRINK_ABORT]
)
def test_shrink_group_after_kills(flags):
    name = meeting_file()

    def body(rank):
        start(rank, 5, name)
        dist.barrier()
        if rank in (0, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank [02]"):
            while True:
                dist.barrier()
        with pytest.raises(dist.DistBackendError, match=r"ranks \[0\] of the group died too"):
            dist.shrink_group([2], shrink_flags=flags)
        dist.shrink_group([0, 2], shrink_flags=flags)
        assert dist.get_world_size() == 3 and dist.get_rank() == [1, 3, 4].index(rank)
        assert summed(rank) == 0b11010
        if rank == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank 4"):
            dist.barrier()
        dist.shrink_group([2], shrink_flags=flags)
        assert summed(rank) == 0b1010
        dist.destroy_process_group()

    run_ranks(5, body, killed=(0, 2, 4))


# A host of its own is a network namespace that is joined to rank 0's, where the store is served
# too, as torchrun does it.
HOSTS = """
import os, subprocess, sys
import torch.distributed as dist
def ip(*words):
    subprocess.run(["ip", *words], check=True)
there = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo here; read go; ip link set lo up;"
                          " ip address add 10.77.0.2/24 dev wire1;"
                          " ip link set wire1 up; RANK=1 exec $0 -c \\"$PROGRAM\\"",
                          sys.executable],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert there.stdout.readline() == "here\\n"
ip("link", "set", "lo", "up")
ip("link", "add", "wire0", "type", "veth", "peer", "name", "wire1", "netns", str(there.pid))
ip("address", "add", "10.77.0.1/24", "dev", "wire0")
ip("link", "set", "wire0", "up")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True,
                      wait_for_workers=False)
here = subprocess.Popen([sys.executable, "-c", os.environ["PROGRAM"]],
                        env=os.environ | {"RANK": "0"}, stdout=subprocess.PIPE, text=True)
print("rank 1:", there.communicate("go\\n")[0])
print("rank 0:", here.communicate()[0])
"""

ON_TWO_HOSTS = """
import datetime, os
import torch
if os.environ["WAY"] == "torch":
    import torch.distributed as dist
    import muster.torch
else:
    import muster as dist
try:
    name = "muster" if os.environ["WAY"] == "torch" else None
    dist.init_process_group(name, timeout=datetime.timedelta(seconds=60))
    x = torch.ones(1)
    dist.all_reduce(x)
    print("sum", x.item())
    dist.destroy_process_group()
except dist.DistError as error:
    print(type(error).__name__, error)
"""


# Over stock torch's open store ranks of other hosts are let in only with a secret, and are told so
@pytest.mark.parametrize(
    "way, secret",
    [
        ("torch", None),
        ("torch", "that of this job's ranks"),
        ("muster", "that of this job's ranks"),
    ],
)
def test_hosts_need_a_secret(way, secret):
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*unshare, "ip", "link"], capture_output=True).returncode != 0:
        pytest.skip(
            "hosts as network namespaces need a kernel that lets this user make them, and iproute2"
        )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")
    }
    environment |= {
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environment |= {"WAY": way, "PROGRAM": ON_TWO_HOSTS}
    if secret:
        environment["MUSTER_SECRET"] = secret
    run = subprocess.run(
        [*unshare, sys.executable, "-c", HOSTS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    for rank in range(2):
        if secret:
            assert f"rank {rank}: sum 2.0" in run.stdout, run.stdout + run.stderr
        else:
            assert re.search(
                f"rank {rank}: Dist\\w*Error .*set MUSTER_SECRET to the same text", run.stdout
            ), run.stdout + run.stderr


def test_abort_ends_the_others():
    def body(rank, size):
        if rank == 0:
            dist.distributed_c10d._abort_process_group()
            return
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            dist.all_reduce(torch.ones(3))

    name = meeting_file()

    def rank_body(rank):
        start(rank, 2, name)
        body(rank, 2)
        if rank == 1:
            dist.destroy_process_group()

    run_ranks(2, rank_body)


def test_ends_without_destroy():
    name = meeting_file()

    def body(rank):
        start(rank, 3, name)
        x = mine(rank, 100000)
        dist.broadcast(x, src=0)
        same(x, mine(0, 100000))
        import muster._C

        muster._C.leave_torch_job(datetime.timedelta(seconds=10))

    run_ranks(3, body)


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
