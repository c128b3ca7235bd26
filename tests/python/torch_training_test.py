"""What people do with stock torch, unchanged, on muster: DDP, fully_shard, DTensor, checkpoints, torchrun."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muster.torch
from ranks import meeting_file, run_ranks

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


def on_ranks(size, body, *arguments, backend="muster"):
    name = meeting_file()

    def rank_body(rank):
        dist.init_process_group(backend, store=dist.FileStore(name, size), rank=rank, world_size=size)
        try:
            return body(rank, size, *arguments)
        finally:
            dist.destroy_process_group()

    return run_ranks(size, rank_body)


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


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
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}, {"static_graph": True}])
def test_ddp_trains_as_on_gloo(options):
    by_muster, by_gloo = (on_ranks(2, trained_by_ddp, options, backend=backend) for backend in ("muster", "gloo"))
    assert by_muster[0][0] == by_muster[1][0]
    for mine, theirs in zip(by_muster[0], by_gloo[0]):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


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
        sum(torch.nn.functional.mse_loss(whole(x), y) for x, y in (batch(r, step) for r in range(size))).div(size).backward()
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


def tensors_on_a_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(30.0).view(5, 6)  # 5 rows: uneven shards
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    product = columns @ distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    assert torch.equal(product.redistribute(mesh, [Replicate()]).to_local(), whole @ torch.ones(6, 2))


# spec: D6 stock DTensor on a stock DeviceMesh
def test_tensors_on_a_mesh():
    on_ranks(3, tensors_on_a_mesh)


# spec: J5 a stock torchrun script
def test_torchrun(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(TORCHRUN_WORKER)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_SECRET")}
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "muster"],
        capture_output=True, text=True, timeout=240, env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert sorted(line for line in run.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 2 [3.0, 3.0, 3.0]" for rank in range(2)
    ]
