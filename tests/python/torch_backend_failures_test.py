# SPDX-License-Identifier: BSD-3-Clause
"""muster as a backend of stock torch: how failures show, and what is left after them."""

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
from stock_ranks import mine, on_ranks, same, start


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
