# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard where a rank ends or stops within a pass, and beside a loader's processes."""

import contextlib
import datetime
import os
import signal

import pytest
import torch
from ranks import fork, meeting_file, run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import on_ranks

import muster as dist
from muster.fsdp import fully_shard

WIDTH = 8
SAID = {
    signal.SIGKILL: "rank 1",
    signal.SIGSTOP: "rank 1 has not answered.*stopped",
}


class Ending(nn.Module):
    """Ends its process once, in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.ends_in, self.ends = None, None

    def forward(self, x):
        if self.ends_in == "forward":
            self.ends()
        x = self.layer(x)
        if self.ends_in == "backward":
            x.register_hook(lambda _: self.ends())
        return x


def sharded():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Ending(), nn.Linear(WIDTH, WIDTH))
    for each in model:
        fully_shard(each)
    return fully_shard(model)


# spec: M3 a rank that is killed or stopped within a pass of sharded units is named by the others
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("how", list(SAID))
def test_a_rank_ends_within_a_pass(how, place):
    name, victim, survivors = meeting_file(), fork.Value("i", 0), fork.Value("i", 2)

    def body(rank):
        dist.init_process_group(
            init_method="file://" + name,
            rank=rank,
            world_size=3,
            timeout=datetime.timedelta(minutes=30),
        )
        model = sharded()
        model(torch.ones(2, WIDTH)).sum().backward()
        if rank == 1:
            victim.value = os.getpid()
            model[1].ends_in, model[1].ends = place, lambda: os.kill(os.getpid(), how)
        with pytest.raises(dist.DistBackendError, match=SAID[how]) as caught:
            for _ in range(3):
                model(torch.ones(2, WIDTH)).sum().backward()
        assert caught.value.ranks == [1]
        with survivors.get_lock():  # while one looks for it, a stopped rank stays stopped
            survivors.value -= 1
            if survivors.value == 0:
                os.kill(victim.value, signal.SIGKILL)
        with contextlib.suppress(dist.DistError):
            dist.destroy_process_group()

    run_ranks(3, body, killed=(1,))


class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, at):
        return torch.full((WIDTH,), at / 12)


def trained(loader):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in loader:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.full_tensor() for each in model.parameters()]


def beside_workers(rank, size):
    alone = trained(DataLoader(Rows(), batch_size=4))
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for mine, expected in zip(trained(loader), alone, strict=True):
        assert torch.equal(mine, expected)


# spec: M5 a loader's forked workers, which start while a sharded model is there
def test_a_loader_with_workers():
    on_ranks(2, beside_workers)
