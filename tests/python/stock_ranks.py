# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of stock torch with muster as backend, and the values of their tensors."""

import datetime

import torch
import torch.distributed as dist
from ranks import meeting_file, run_ranks

import muster.torch  # noqa: F401  registers the backend


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
