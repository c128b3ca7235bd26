# SPDX-License-Identifier: BSD-3-Clause
"""Clauses of the acceptance list that the other files name and do not try in Python."""

import inspect
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks
from rpc_workers import on_workers
from thread_ranks import on_threads, row, same

import muster as dist
from muster.nn.parallel import DataParallel, DistributedDataParallel


# spec: D5 D9 meshes of eight ranks: rows and columns, and refusals on every rank
def test_meshes_of_eight():
    from muster.device_mesh import DeviceMesh, init_device_mesh

    def body(rank, size):
        mesh = DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("rows", "columns"))
        x = row(rank)
        dist.all_reduce(x, group=mesh.get_group(0))
        same(x, row(rank % 4) + row(rank % 4 + 4))
        x = row(rank)
        dist.all_reduce(x, group=mesh.get_group(1))
        first = rank // 4 * 4
        same(x, sum(row(each) for each in range(first, first + 4)))
        assert mesh.get_coordinate() == (rank // 4, rank % 4)
        for refused in (
            lambda: init_device_mesh("cpu", (2, 3)),
            lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "x")),
            lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("x",)),
            lambda: init_device_mesh("cpu", (2, 4) if rank else (4, 2)),
        ):
            with pytest.raises(dist.DistError):
                refused()
        with pytest.raises(TypeError):
            init_device_mesh("cpu", (8,), ("x",))

    on_threads(8, body)


def test_a_mesh_makes_the_default_group():
    from muster.device_mesh import init_device_mesh

    def body(rank):
        assert not dist.is_initialized()
        mesh = init_device_mesh("cpu", (2,))
        assert dist.is_initialized() and dist.get_world_size() == 2 == mesh.size()
        dist.destroy_process_group()

    dist.spawn(body, nprocs=2, threads=True)


# spec: G3 where lists are given, and what is written
def test_lists_of_object_collectives():
    def body(rank, size):
        found = [None] * size if rank == 0 else None
        dist.gather_object(rank, found)
        assert found == ([0, 1, 2] if rank == 0 else None)
        wrong = [None] * (size - 1) if rank == 0 else None
        with pytest.raises(ValueError):
            dist.gather_object(rank, wrong)
        mine = ["before", "stays"]
        given = {0: ["a", "b", "c"], 1: None, 2: ["any", "list"]}[rank]
        dist.scatter_object_list(mine, given, src=0)
        assert mine == ["abc"[rank], "stays"]
        with pytest.raises(ValueError):
            dist.scatter_object_list([] if rank == 1 else [None], given, src=0)
        objects = [rank, None]
        dist.broadcast_object_list(objects, src=2, device=torch.device("cpu"))
        assert objects == [2, None]
        defaults = inspect.signature(dist.broadcast_object_list).parameters
        assert defaults["src"].default is defaults["device"].default is None

    on_threads(3, body)


# spec: H2 variables when the process starts
@pytest.mark.parametrize("text, level", [("DETAIL", "DETAIL"), ("info", "INFO"), (None, "OFF")])
def test_debug_level_at_the_start(text, level):
    environment = {n: v for n, v in os.environ.items() if n != "TORCH_DISTRIBUTED_DEBUG"}
    if text is not None:
        environment["TORCH_DISTRIBUTED_DEBUG"] = text
    program = "import muster; print(muster.get_debug_level().name)"
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == level, run.stderr


def model_of(value):
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


# spec: K1.process_group K1.dim in Python: process_group and dim
def test_models_on_a_group_of_their_own():
    def body(rank, size):
        pair = dist.new_group([0, 2])
        if rank == 1:
            return
        model = DistributedDataParallel(model_of(rank + 1.0), process_group=pair, dim=1)
        assert model.process_group == pair and model.dim == 1
        same(model.module.weight.detach(), torch.full((2, 3), 1.0))
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        same(model.module.weight.grad, torch.full((2, 3), 2.0))

    on_threads(3, body)


# spec: K9 in Python: defaults, several ids, output_device, nothing moves without ids
def test_devices_of_models():
    options = inspect.signature(DistributedDataParallel).parameters
    assert options["dim"].default == 0
    for name in ("device_ids", "output_device", "process_group", "bucket_cap_mb"):
        assert options[name].default is None
    for name in ("find_unused_parameters", "check_reduction", "static_graph"):
        assert options[name].default is False
    assert inspect.signature(DataParallel).parameters["dim"].default == 0

    def body(rank, size):
        model = DistributedDataParallel(model_of(1.0))
        assert model.broadcast_buffers and model.device_ids is None and model.output_device is None
        seen = []
        model.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        x = torch.ones(1, 3)
        model(x)
        assert seen[0] is x
        with pytest.raises(ValueError, match="needs an index"):
            DistributedDataParallel(model_of(1.0), device_ids=["cpu"])

    on_threads(2, body)


class Counter:
    """A counter of a worker for others."""

    def __init__(self):
        self.value = torch.nn.Parameter(torch.ones(2))

    def times(self, factor):
        return self.value * factor

    def parameter(self):
        return dist.rpc.RRef(self.value)


def several_contexts(rank):
    """Two threads, each with a context and an optimizer's step of its own; a process group beside
    them.
    """
    import threading

    rpc, autograd = dist.rpc, dist.autograd
    assert not dist.is_initialized()
    if rank == 1:
        return None
    counter = rpc.remote("worker1", Counter)
    parameter = counter.rpc_sync().parameter()
    optimizer = dist.optim.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
    gradients = {}

    def train(factor):
        with autograd.context() as context:
            loss = counter.rpc_sync().times(factor).sum()
            autograd.backward(context, [loss])
            gradients[factor] = rpc.rpc_sync("worker1", _gradient, (context, parameter)).tolist()
            optimizer.step(context)

    threads = [threading.Thread(target=train, args=(factor,)) for factor in (1.0, 3.0)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return gradients, parameter.to_here().tolist()


def _gradient(context, parameter):
    return dist.autograd.get_gradients(context)[parameter.local_value()]


# spec: N14 init_rpc starts no process group; several contexts at once; step(context)
def test_contexts_beside_each_other():
    gradients, value = on_workers(2, several_contexts)[0]
    assert gradients == {1.0: [1, 1], 3.0: [3, 3]}
    assert value == [-1, -1]  # 1 - 0.5 * (1 + 3)


def members(rank):
    """RRef and WorkerInfo as their users see them."""
    rpc = dist.rpc
    me = rpc.get_worker_info()
    assert (me.name, me.id) == (f"worker{rank}", rank)
    with pytest.raises(TypeError):
        rpc.WorkerInfo("other", 1)
    own = rpc.RRef(torch.ones(1, requires_grad=True))
    assert own.confirmed_by_owner() and own.is_owner() and own.owner() == me
    with dist.autograd.context() as context:
        rpc.RRef((own.local_value() * 3).sum()).backward(context)
        assert dist.autograd.get_gradients(context)[own.local_value()].tolist() == [3]
    return True


# spec: N11 get_worker_info, WorkerInfo, RRef.backward, confirmed_by_owner
def test_members_of_references():
    assert on_workers(2, members) == [True, True]


# spec: J3.monitor_interval --monitor-interval is taken, and delays nothing; what is no time is a
# usage error
def test_monitor_interval():
    muster = pathlib.Path(dist.__file__).parents[2] / "bin/muster"

    def run(interval):
        line = [
            muster,
            "run",
            "--standalone",
            "--nproc-per-node=1",
            f"--monitor-interval={interval}",
        ]
        return subprocess.run(
            [*line, "--no-python", "sh", "-c", "exit 3"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    assert run(3600).returncode == 3
    refused = run("soon")
    assert refused.returncode == 2 and "--monitor-interval" in refused.stderr


# spec: H9 object collectives, batches and coalesced calls are ranges too
def test_profiles_of_objects_and_batches():
    def body(rank, size):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.broadcast_object_list([{"of": rank}], src=0)
            dist.all_gather_object([None] * size, rank)
            sent, received = torch.ones(2), torch.zeros(2)
            messages = [
                dist.P2POp(dist.isend, sent, 1 - rank),
                dist.P2POp(dist.irecv, received, 1 - rank),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            dist.all_reduce_coalesced([sent, received])
        return sorted({event.name for event in profile.events() if "native" in event.name})

    meeting = meeting_file()

    def rank_body(rank):
        dist.init_process_group(init_method="file://" + meeting, rank=rank, world_size=2)
        names = body(rank, 2)
        dist.destroy_process_group()
        return names

    for names in run_ranks(2, rank_body):
        for part in ("broadcast", "all_gather", "isend", "irecv", "all_reduce_coalesced"):
            assert any(part in name for name in names), names


def ones(count=4, dtype=None):
    return torch.ones(count, dtype=dtype)


DIFFERENT = {
    "operation": lambda rank: dist.all_reduce(ones()) if rank else dist.broadcast(ones(), 0),
    "size": lambda rank: dist.all_reduce(ones(4 + rank)),
    "reduction": lambda rank: dist.all_reduce(
        ones(), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    ),
    "dtype": lambda rank: dist.all_reduce(ones(dtype=torch.float64 if rank == 2 else None)),
    "root": lambda rank: dist.broadcast(ones(), rank),
}


# spec: F18 within a second by a clock, where nothing but the difference ends the calls; the best of
# a few tries, since the machine may be busy
@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_told_within_a_second(what):
    times = []

    def body(rank, size):
        dist.barrier()
        begun = time.monotonic()
        with pytest.raises(dist.DistError):
            while time.monotonic() < begun + 30:  # who had returned learns it at the next call
                DIFFERENT[what](rank)
        times.append(time.monotonic() - begun)

    for _ in range(5):
        times.clear()
        on_threads(3, body)
        if max(times) < 1:
            return
    pytest.fail(f"{what}: the ranks knew after {times} s")


# spec: K2 in Python: the first bucket travels before backward has reached the first layer
def test_buckets_travel_during_backward():
    def body(rank, size):
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
        order = []

        def hook(state, bucket):
            order.append("bucket")
            return _sum_of(bucket)

        model.register_comm_hook(None, hook)
        layers[0].weight.register_hook(lambda gradient: order.append("first layer"))
        for _ in range(
            2
        ):  # the first pass finds the order, in which the second one has its buckets
            order.clear()
            model(torch.ones(2, 64)).sum().backward()
        assert order[0] == "bucket" and "first layer" in order, order

    on_threads(2, body)


def _sum_of(bucket):
    later = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return later.then(lambda done: done.value()[0])
