# SPDX-License-Identifier: BSD-3-Clause
"""A model, its data and its steps, for tests of training on several ranks."""

import torch
import torch.distributed as theirs
from ranks import meeting_file, run_ranks

import muster as dist
from muster.algorithms.ddp_comm_hooks import lazily


def on_ranks(size, body, *arguments, gloo=False):
    """body(rank, size, ...) in processes, between init and destroy of muster and, with `gloo`, of
    torch.distributed.
    """
    mine, name_of_theirs = meeting_file(), meeting_file()

    def rank_body(rank):
        dist.init_process_group(init_method="file://" + mine, rank=rank, world_size=size)
        if gloo:
            theirs.init_process_group(
                "gloo", store=theirs.FileStore(name_of_theirs, size), rank=rank, world_size=size
            )
        value = body(rank, size, *arguments)
        if gloo:
            theirs.destroy_process_group()
        dist.destroy_process_group()
        return value

    return run_ranks(size, rank_body)


class Net(torch.nn.Module):
    """Batch norm for buffers, a parameter used twice, and one that `narrow` leaves out."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.twice = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 4)
        self.extra = torch.nn.Linear(16, 4)

    def forward(self, x, narrow=False):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        return self.last(x) if narrow else self.last(x) + self.extra(x)


def batch(rank, step, rows=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def loss_of(model, rank, step, **options):
    x, y = batch(rank, step)
    return torch.nn.functional.mse_loss(model(x, **options), y)


def train(model, optimizer, rank, steps=5, **options):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step, **options).backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_equal(mine, others):
    for (name, a), b in zip(mine.state_dict().items(), others.state_dict().values(), strict=True):
        assert torch.equal(a, b), f"{name}: {a} is not {b}"


def lazy_hook(state, bucket):
    def averaged():
        dist.all_reduce(bucket.buffer(), group=bucket.group)
        return bucket.buffer() / dist.get_world_size()

    return lazily(averaged)
