# SPDX-License-Identifier: BSD-3-Clause
"""Saves and loads that go on at once, under stock torch and under muster."""

import threading

import pytest
import torch
import torch.distributed as theirs
from ranks import LIMIT_S, meeting_file, run_ranks

import muster as dist
import muster.torch
from muster import checkpoint


def at_once(rank, size, path):
    """Rank 0's thread comes to the end of its part of a save long before rank 1's."""
    checkpoint.save({"a": torch.arange(4.0)}, checkpoint_id=f"{path}/good")
    state = {"x": torch.zeros(4), f"only{rank}": torch.zeros(1 << (12 if rank == 0 else 22))}

    def loaded():
        target = {"a": torch.zeros(4)}
        checkpoint.load(target, checkpoint_id=f"{path}/good")
        return target["a"].tolist() == [0, 1, 2, 3]

    for round_ in range(3):
        future = checkpoint.async_save(state, checkpoint_id=f"{path}/next-{round_}")
        assert all(loaded() for _ in range(3))
        if round_ == 0:
            checkpoint.save({"a": torch.ones(1)}, checkpoint_id=f"{path}/between")
        if round_ == 1:
            other = checkpoint.async_save({"a": torch.ones(1)}, checkpoint_id=f"{path}/second")
            assert loaded()
            other.result(120)
        future.result(120)
    return True


def in_another_thread(rank, size, path):
    """A thread loads, on both ranks, while this one saves."""
    found = []

    def load():
        for _ in range(5):
            target = {"a": torch.zeros(4)}
            checkpoint.load(target, checkpoint_id=f"{path}/good")
            found.append(target["a"].tolist())

    loader = threading.Thread(target=load)
    loader.start()
    for round_ in range(5):
        checkpoint.save({"b": torch.ones(4)}, checkpoint_id=f"{path}/{round_ % 2}")
        checkpoint.async_save({"b": torch.ones(4)}, checkpoint_id=f"{path}/c").result(120)
    loader.join(LIMIT_S)
    assert found == [[0, 1, 2, 3]] * 5


def stock_rank(rank, size, backend, name, path):
    theirs.init_process_group(
        backend, store=theirs.FileStore(name, size), rank=rank, world_size=size
    )
    at_once(rank, size, path)
    in_another_thread(rank, size, path)
    theirs.destroy_process_group()


# spec: S5 under stock torch loads, saves and asynchronous saves go on at once: each has ranks that
# meet on a group of its own
@pytest.mark.parametrize("backend", ["gloo", "muster"])
def test_under_stock_torch(tmp_path, backend):
    name = meeting_file()
    run_ranks(2, lambda rank: stock_rank(rank, 2, backend, name, str(tmp_path)))


def muster_rank(rank, size, name, path):
    dist.init_process_group(init_method="file://" + name, rank=rank, world_size=size)
    at_once(rank, size, path)
    dist.destroy_process_group()


# spec: S5 the same under muster
def test_under_muster(tmp_path):
    name = meeting_file()
    run_ranks(2, lambda rank: muster_rank(rank, 2, name, str(tmp_path)))
