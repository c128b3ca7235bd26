# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are threads of the test, for what dies nowhere; with the values that tests give and
compare.
"""

import datetime

import torch
from ranks import run_ranks

import muster as dist

SECONDS = datetime.timedelta(seconds=60)


def on_threads(size, body, *arguments, backend=None, timeout=SECONDS):
    """Runs body(rank, size, ...) on ranks that are threads, between init and destroy."""
    store = dist.HashStore()

    def rank_body(rank):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        body(rank, size, *arguments)
        dist.destroy_process_group()

    dist.spawn(rank_body, nprocs=size, threads=True)


def on_processes(size, body, init_method, **options):
    """The same on processes, which meet by `init_method(process)`; what body(rank) returns, by
    process.
    """

    def rank_body(process):
        dist.init_process_group(init_method=init_method(process), timeout=SECONDS, **options)
        result = body(dist.get_rank())
        dist.destroy_process_group()
        return result

    return run_ranks(size, rank_body)


def same(actual, expected):
    assert torch.equal(actual, expected), f"{actual}\nis not\n{expected}"


def row(rank, dtype=torch.int64):
    return (torch.arange(4) + 10 * rank).to(dtype)
