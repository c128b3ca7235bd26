# SPDX-License-Identifier: BSD-3-Clause
"""Programs of stock torch, unchanged: DDP, fully_shard, DTensor, checkpoints, torchrun."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from ranks import LIMIT_S, meeting_file, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muster.torch

TORCHRUN_WORKER = """
import os, sys
import torch, torch.distributed as dist
import muster.torch
dist.init_process_group(sys.argv[1])
assert dist.get_backend() == sys.argv[1]
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} {x.tolist()}\\n".encode())
dist.destroy_process_group()
"""

DIST_OF_THE_WAY = """
import datetime, os, sys
import torch
if sys.argv[1] == "torch":
    import torch.distributed as dist
    import muster.torch
else:
    import muster as dist
backend = {"backend": "muster"} if sys.argv[1] == "torch" else {}
"""

TURNS_WORKER = (
    DIST_OF_THE_WAY
    + """
for turn in range(3):
    dist.init_process_group(**backend, timeout=datetime.timedelta(seconds=60))
    group = dist.new_group([0, 1])
    x = torch.full((1,), turn)
    dist.all_reduce(x, group=group)
    os.write(1, f"rank {dist.get_rank()} turn {turn} sum {x.item()}\\n".encode())
    dist.destroy_process_group()
"""
)

# In each of the first two runs another rank ends; torchrun kills the others wherever they are.
RESTART_WORKER = (
    DIST_OF_THE_WAY
    + """
rank, run, end = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[2]
if run < 2 and rank == run and end == "before init":
    os._exit(3)
dist.init_process_group(**backend, timeout=datetime.timedelta(seconds=60))
x = torch.full((1,), rank + 1.0)
dist.all_reduce(x)
if run < 2 and rank == run:
    os._exit(3)
if run == 2:
    os.write(1, f"rank {rank} run {run} sum {x.item()}\\n".encode())
dist.destroy_process_group()
"""
)


def on_ranks(size, body, *arguments, backend="muster"):
    name = meeting_file()

    def rank_body(rank):
        dist.init_process_group(
            backend, store=dist.FileStore(name, size), rank=rank, world_size=size
        )
        try:
            return body(rank, size, *arguments)
        finally:
            dist.destroy_process_group()

    return run_ranks(size, rank_body)


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def train(net, rank, steps=4):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def trained_by_ddp(rank, size, options):
    net = torch.nn.parallel.DistributedDataParallel(model(), **options)
    train(net, rank)
    # As numbers: a tensor's memory would go with this process.
    return [value.flatten().tolist() for value in net.state_dict().values()]


# spec: A2 stock DDP trains as on Gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}, {"static_graph": True}],
)
def test_ddp_trains_as_on_gloo(options):
    by_muster, by_gloo = (
        on_ranks(2, trained_by_ddp, options, backend=backend) for backend in ("muster", "gloo")
    )
    assert by_muster[0][0] == by_muster[1][0]
    for mine, theirs in zip(by_muster[0], by_gloo[0]):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


class Waves(torch.nn.Module):
    """Complex within."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.way_in = torch.nn.Linear(8, 6)
        self.turn = torch.nn.Parameter(torch.randn(6, 7, dtype=torch.complex64) / 2)
        self.out = torch.nn.Linear(7, 4, dtype=torch.complex128)

    def forward(self, x):
        z = self.way_in(x).to(torch.complex64) @ self.turn
        return self.out(z.to(torch.complex128)).abs().float()


def trained_with_complex_parameters(rank, size, options, hook):
    net = torch.nn.parallel.DistributedDataParallel(Waves(), **options)
    if hook is not None:
        net.register_comm_hook(None, hook)
    train(net, rank)
    numbers = [each.detach().to(torch.complex128) for each in net.parameters()]
    return [torch.view_as_real(each).flatten().tolist() for each in numbers]


# spec: A2 stock DDP trains complex parameters as on Gloo, with buckets of the backend's memory
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options, hook",
    [
        ({}, None),
        ({"gradient_as_bucket_view": True}, None),
        ({"bucket_cap_mb": 1e-5}, None),
        ({"static_graph": True}, None),
        ({"find_unused_parameters": True}, None),
        ({}, default_hooks.allreduce_hook),
        ({}, default_hooks.fp16_compress_hook),
        ({}, default_hooks.bf16_compress_hook),
    ],
)
def test_ddp_trains_complex_parameters(options, hook):
    by_muster, by_gloo = (
        on_ranks(2, trained_with_complex_parameters, options, hook, backend=backend)
        for backend in ("muster", "gloo")
    )
    assert by_muster[0] == by_muster[1]
    for mine, theirs in zip(by_muster[0], by_gloo[0]):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def trained_by_hook_that_resizes(rank, size, options):
    net = torch.nn.parallel.DistributedDataParallel(model(), **options)

    def hook(_, bucket):
        buffer = bucket.buffer()
        count = buffer.numel()
        buffer.resize_(count + 7)[count:].zero_()

        def back(future):
            return future.value()[0].resize_(count).div_(size)

        return dist.all_reduce(buffer, async_op=True).get_future().then(back)

    net.register_comm_hook(None, hook)
    train(net, rank)
    return [value.flatten().tolist() for value in net.state_dict().values()]


# spec: A2 a communication hook may resize its bucket, also one of the backend's memory, as on Gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_hook_resizes_bucket(options):
    by_muster, by_gloo = (
        on_ranks(2, trained_by_hook_that_resizes, options, backend=backend)
        for backend in ("muster", "gloo")
    )
    assert by_muster[0][0] == by_muster[1][0]
    for mine, theirs in zip(by_muster[0], by_gloo[0]):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


def buckets_in_shared_memory(rank, size):
    net = torch.nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    for step in range(2):  # the second with buckets that were laid out anew
        torch.nn.functional.mse_loss(net(batch(rank, step)[0]), batch(rank, step)[1]).backward()
        assert all(muster.in_shared_memory(parameter.grad) for parameter in net.parameters())
    cpu = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(cpu)
    assert backend.supports_tensor_alloc(cpu)
    for dtype in (torch.int64, torch.complex64):
        memory = backend.allocate_tensor(5, dtype=dtype, device=cpu)
        assert memory.shape == (5,) and memory.dtype == dtype and muster.in_shared_memory(memory)


@pytest.mark.skipif(
    torch.cuda.device_count() > 0,
    reason="left to the user where a GPU's backend would allocate memory too",
)
def test_buckets_of_ddp_are_in_shared_memory():
    on_ranks(2, buckets_in_shared_memory)


def pass_with(hook):
    """A backward pass in which `hook` is called."""
    with torch.enable_grad():
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()


def calls_in_backward(rank, size):
    torch.set_num_threads(
        2 * os.cpu_count()
    )  # no core is free beside such ranks: the passes drive their calls themselves
    whole = torch.full((100_000,), float(sum(range(size))))

    def mine():
        return torch.full_like(whole, rank)

    # The future is waited for in the middle of the pass, by a thread that drives nothing meanwhile.
    def waits(grad):
        x = mine()
        dist.all_reduce(x, async_op=True).get_future().wait()
        assert torch.equal(x, whole)

    for _ in range(3):
        pass_with(waits)

    # One call leads to the next; all are over with the pass, or soon after it.
    x, futures = mine(), []

    def leads_on(grad):
        def again(future):
            futures.append(dist.all_reduce(x, async_op=True).get_future())
            return future.value()

        futures.append(dist.all_reduce(x, async_op=True).get_future().then(again))

    pass_with(leads_on)
    futures[0].wait()
    futures[1].wait()
    assert torch.equal(x, whole * size)

    # Rank 0's call can only end when its pass has.
    x, later = mine(), []
    if rank == 0:
        pass_with(lambda grad: later.append(dist.all_reduce(x, async_op=True).get_future()))
        for other in range(1, size):
            dist.send(torch.ones(1), other)
        later[0].wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(x)
    assert torch.equal(x, whole)

    # A pass within a pass, and one that fails.
    works, y = [], mine()
    pass_with(
        lambda grad: (
            (works.append(dist.all_reduce(y, async_op=True)), pass_with(waits), waits(grad))
            and None
        )
    )
    works[0].wait()
    assert torch.equal(y, whole)
    x = mine()

    def fails(grad):
        works.append(dist.all_reduce(x, async_op=True))
        raise KeyError("a hook of the user's")

    with pytest.raises(KeyError):
        pass_with(fails)
    works[1].wait()
    assert torch.equal(x, whole)


# spec: E3 futures of calls in a backward pass in stock torch
def test_calls_in_backward():
    on_ranks(3, calls_in_backward)


def sharded(rank, size, folder):
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    torch.manual_seed(1)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    whole = copy.deepcopy(net)
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    assert isinstance(net[0].weight, DTensor) and net[0].weight.to_local().shape[0] == 16 // size
    train(net, rank)
    # The same by one process on all batches.
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        sum(
            torch.nn.functional.mse_loss(whole(x), y)
            for x, y in (batch(r, step) for r in range(size))
        ).div(size).backward()
        optimizer.step()
    for shard, parameter in zip(net.parameters(), whole.parameters()):
        torch.testing.assert_close(shard.full_tensor(), parameter)

    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert norm.full_tensor() > 0

    state = {"net": net.state_dict()}
    checkpoint.save(state, checkpoint_id=folder)
    expected = [parameter.full_tensor().clone() for parameter in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = {"net": net.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])
    for parameter, value in zip(net.parameters(), expected):
        torch.testing.assert_close(parameter.full_tensor(), value)


# spec: A2 stock fully_shard trains as one process, stock checkpoints are saved and loaded
def test_fully_shard_and_checkpoint(tmp_path):
    on_ranks(2, sharded, str(tmp_path))


def sharded_with_complex_parameters(rank, size):
    grads = []
    for by_backend in (False, True):
        torch.manual_seed(1)
        net = torch.nn.Linear(8, 5, dtype=torch.complex64)
        fully_shard(net, mesh=dist.init_device_mesh("cpu", (size,)))
        net.set_allocate_memory_from_process_group_for_comm(by_backend)
        net(batch(rank, 0)[0].to(torch.complex64)).abs().sum().backward()
        grads += [each.grad.full_tensor() for each in net.parameters()]
    return [torch.view_as_real(each.to(torch.complex128)).flatten().tolist() for each in grads]


# spec: A2 stock fully_shard of complex parameters, also in memory of the backend
def test_fully_shard_of_complex_parameters():
    by_muster, by_gloo = (
        on_ranks(2, sharded_with_complex_parameters, backend=backend)
        for backend in ("muster", "gloo")
    )
    for mine, theirs in zip(by_muster[0], by_gloo[0]):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def tensors_on_a_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(30.0).view(5, 6)  # 5 rows: uneven shards
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = columns @ distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    assert torch.equal(
        product.redistribute(mesh, [Replicate()]).to_local(), whole @ torch.ones(6, 2)
    )


# spec: D6 stock DTensor on a stock DeviceMesh
def test_tensors_on_a_mesh():
    on_ranks(3, tensors_on_a_mesh)


def torchrun(folder, program, *arguments, options=()):
    """The ranks' lines that begin with "rank", sorted."""
    script = folder / "worker.py"
    script.write_text(program)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MUSTER_SECRET")
    }
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            *options,
            str(script),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return sorted(line for line in run.stdout.splitlines() if line.startswith("rank"))


# spec: J5 a stock torchrun script
def test_torchrun(tmp_path):
    assert torchrun(tmp_path, TORCHRUN_WORKER, "muster") == [
        f"rank {rank} of 2 [3.0, 3.0, 3.0]" for rank in range(2)
    ]


# spec: J5 under stock torchrun, init after destroy, by torch and by muster's own interface
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["torch", "muster"])
def test_torchrun_init_after_destroy(tmp_path, way):
    assert torchrun(tmp_path, TURNS_WORKER, way) == [
        f"rank {rank} turn {turn} sum {2 * turn}" for rank in range(2) for turn in range(3)
    ]


# spec: J5 under stock torchrun, workers that are started again meet on the store in which the first
# ones left their keys
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way, end", [("torch", "before init"), ("muster", "after init")])
def test_torchrun_starts_workers_again(tmp_path, way, end):
    said = torchrun(tmp_path, RESTART_WORKER, way, end, options=["--max-restarts", "2"])
    assert said == [f"rank {rank} run 2 sum 3.0" for rank in range(2)]
