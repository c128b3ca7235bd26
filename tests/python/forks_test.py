# SPDX-License-Identifier: BSD-3-Clause
"""Children that a rank forks, and that end without destroy: the rank and the job live on."""

import concurrent.futures
import ctypes
import os

import pytest
import torch
import torch.distributed as stock
from ranks import fork, meeting_file, run_ranks

import muster as dist
import muster.torch  # noqa: F401 - the backend "muster" of stock torch


def exits_forked(status):
    """A child that ends by exit(), with the exit handlers of C, as a program does."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def forks_bare():
    for status in (0, 3):
        exits_forked(status)


def forks_processes():
    children = [fork.Process(target=torch.ones, args=(2,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0


def forks_a_pool():
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]


def forks_beside_idle_threads():
    with concurrent.futures.ThreadPoolExecutor(2) as idle:
        assert list(idle.map(abs, [-1, -2])) == [1, 2]
        forks_bare()
        forks_processes()


# spec: H7 a forked child that ends is no death of the rank, on both faces
@pytest.mark.parametrize("face", [dist, stock], ids=["muster", "stock"])
@pytest.mark.parametrize(
    "forks", [forks_bare, forks_processes, forks_a_pool, forks_beside_idle_threads]
)
def test_the_end_of_a_forked_child_ends_no_rank(face, forks):
    name = meeting_file()
    backend = "muster" if face is stock else None

    def body(rank):
        face.init_process_group(backend, init_method="file://" + name, rank=rank, world_size=3)
        face.all_reduce(torch.ones(4))
        if rank == 1:
            forks()
        face.barrier()
        if rank == 2:
            forks()
        x = torch.ones(4)
        face.all_reduce(x)
        assert x.tolist() == [3] * 4
        face.destroy_process_group()

    run_ranks(3, body)
