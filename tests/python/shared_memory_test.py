# SPDX-License-Identifier: BSD-3-Clause
"""The shared allocator from Python: ordinary tensors, training, and torch's own DataLoader with
forked workers.
"""

import datetime
import os
import pathlib
import subprocess

import pytest
import torch
from ranks import LIMIT_S, meeting_file, run_ranks
from torch.utils.data import DataLoader, Dataset

import muster as dist


@pytest.fixture
def sharing():
    dist.use_shared_allocator()
    yield
    dist.use_shared_allocator(False)


def test_ordinary_tensors(sharing):
    before = dist.shared_allocator_stats()
    assert before["enabled"]
    x = torch.randn(300, 300)
    assert (
        dist.in_shared_memory(x)
        and dist.in_shared_memory(x @ x)
        and not dist.in_shared_memory(torch.ones(3))
    )
    assert not dist.in_shared_memory(torch.from_numpy(x.numpy().copy()))
    assert dist.shared_allocator_stats()["bytes_in_use"] >= before["bytes_in_use"] + x.nbytes
    del x
    assert dist.shared_allocator_stats()["bytes_in_use"] == before["bytes_in_use"]
    dist.trim_shared_allocator()
    dist.use_shared_allocator(private_up_to=10**6)
    assert not dist.in_shared_memory(torch.ones(200_000)) and dist.in_shared_memory(
        torch.ones(300_000)
    )
    dist.use_shared_allocator(enabled=False)
    assert (
        not dist.in_shared_memory(torch.ones(300_000))
        and not dist.shared_allocator_stats()["enabled"]
    )


class Pictures(Dataset):
    """Large tensors made in the parent; `scratch` is written by every worker, as data sets with
    buffers do.
    """

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.pictures = torch.randn(40, 3, 64, 64, generator=generator)
        self.scratch = torch.zeros(3, 64, 64)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        self.scratch.copy_(self.pictures[index])
        for _ in range(5):  # time for other workers to spoil it, if they could
            self.scratch.mul_(2).sub_(self.pictures[index])
        return (
            self.scratch.clone(),
            torch.full((20_000,), index),
            dist.in_shared_memory(torch.empty(100_000)),
        )


def one_epoch(workers):
    torch.manual_seed(5)
    data = Pictures()
    kept = data.pictures.clone()
    batches = list(
        DataLoader(
            data,
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
    )
    assert torch.equal(data.pictures, kept)
    if workers:
        assert torch.equal(data.scratch, torch.zeros(3, 64, 64)), (
            "a worker's write shows in the parent"
        )
    return batches


def test_data_loader_with_forked_workers_gives_the_same(sharing):
    dist.use_shared_allocator(False)
    expected = one_epoch(0)
    dist.use_shared_allocator()
    for workers in (0, 2):
        batches = one_epoch(workers)
        assert len(batches) == len(expected) == 10
        for mine, wanted in zip(batches, expected):
            assert torch.equal(mine[0], wanted[0]) and torch.equal(mine[1], wanted[1])
            assert mine[2].tolist() == [workers == 0] * 4, (
                "a forked child takes its memory elsewhere"
            )


def _train(rank, size, name, share):
    dist.init_process_group(
        init_method="file://" + name,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
        share_memory=share,
    )
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = [(torch.randn(64), i % 10) for i in range(48)]
    loader = DataLoader(
        data[rank::size], batch_size=6, num_workers=1, multiprocessing_context="fork"
    )
    shared = 0
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            for parameter in model.parameters():
                shared += dist.in_shared_memory(parameter.grad)
                dist.all_reduce(parameter.grad)
            optimizer.step()
    dist.destroy_process_group()
    return share == (shared > 0), [parameter.detach().tolist() for parameter in model.parameters()]


def test_training_gives_the_same_with_it():
    weights = []
    for share in (False, True):
        returned = run_ranks(2, _train, 2, meeting_file(), share)
        assert all(right for right, _ in returned)
        assert returned[0][1] == returned[1][1]
        weights.append(returned[0][1])
    assert weights[0] == weights[1]


def test_the_environment_turns_it_on():
    os.environ["MUSTER_SHARE_MEMORY"] = "yes"
    try:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        assert dist.shared_allocator_stats()["enabled"] and dist.in_shared_memory(
            torch.ones(100_000)
        )
        dist.destroy_process_group()
    finally:
        del os.environ["MUSTER_SHARE_MEMORY"]
        dist.use_shared_allocator(False)


# spec: M1 where address space is limited (ulimit -v, as PBS and SGE do it) to less than the arenas
# of all ranks, or than the memory of the group too, sharded training copies and goes on
@pytest.mark.parametrize("kibibytes", [4_000_000, 20_000_000])
@pytest.mark.parametrize("shares", [{}, {"MUSTER_SHARE_MEMORY": "1"}])
def test_limited_address_space(kibibytes, shares):
    programs = pathlib.Path(dist.__file__).parents[2] / "bin"
    line = f"ulimit -v {kibibytes}; exec {programs}/muster run --standalone --nproc-per-node 2 "
    done = subprocess.run(
        ["sh", "-c", line + f"{programs}/sharded"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | shares | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "like one process" in done.stdout
    assert ("tensors stay private" in done.stderr) == bool(shares)
