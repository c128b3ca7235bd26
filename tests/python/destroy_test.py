# SPDX-License-Identifier: BSD-3-Clause
"""destroy_process_group where the ranks do not come together, as programs of torch do."""

import datetime
import os
import pathlib
import signal

import pytest
import torch
from ranks import LIMIT_S, fork, meeting_file, run_ranks

import muster as dist

LONG = datetime.timedelta(minutes=30)


def join(name, rank, size, **arguments):
    dist.init_process_group(
        init_method="file://" + name, rank=rank, world_size=size, timeout=LONG, **arguments
    )


# spec: B10 groups destroyed in another order on each rank
def test_groups_destroyed_in_crossed_order():
    name = meeting_file()

    def body(rank):
        join(name, rank, 2)
        groups = [dist.new_group(), dist.new_group()]
        for group in groups:
            dist.all_reduce(torch.ones(2), group=group)
        for group in groups if rank == 0 else reversed(groups):
            dist.destroy_process_group(group)
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()

    run_ranks(2, body)


# spec: B10 a group that one rank never destroys, and a rank that works on
def test_a_rank_that_works_on_learns_who_has_left():
    name, gone = meeting_file(), fork.Event()

    def body(rank):
        join(name, rank, 2)
        group = dist.new_group()
        dist.all_reduce(torch.ones(2), group=group)
        if rank == 0:
            dist.destroy_process_group(group)
            gone.set()
        else:
            assert gone.wait(LIMIT_S)
            with pytest.raises(dist.DistBackendError, match="rank 0") as caught:
                dist.all_reduce(torch.ones(2), group=group)
            assert caught.value.code != "timed out"
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()

    run_ranks(2, body)


# spec: B10 a rank that has destroyed the default group and ended is not reported as dead
def test_a_rank_that_has_left_the_job_is_no_death():
    name, left = meeting_file(), fork.Value("i", 0)

    def body(rank):
        join(name, rank, 3)
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2))
        if rank == 2:
            dist.destroy_process_group()
            left.value = 1
            return
        gone = torch.zeros(1)
        while not gone.item():
            gone = torch.tensor([float(left.value)])
            dist.all_reduce(gone, group=pair)
        for _ in range(100):
            dist.all_reduce(torch.ones(2), group=pair)
        with pytest.raises(dist.DistBackendError, match="rank 2") as caught:
            dist.recv(torch.zeros(2), 2)
        assert "died" not in str(caught.value) and "process is gone" not in str(caught.value)

    run_ranks(3, body)


# spec: B10 a rank leaves the job in destroy_process_group, also where a program still has a group,
# a mesh or a model: it may end at once, and the others must not take that for a death
# spec: V10.stall at the default level a thread reports stalls; it goes with the job
def test_a_group_that_is_kept_does_not_keep_the_job():
    name = meeting_file()

    def threads():
        return [
            pathlib.Path(f"/proc/self/task/{each}/comm").read_text().strip()
            for each in os.listdir("/proc/self/task")
        ]

    def body(rank):
        join(name, rank, 2)
        kept = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=kept)
        assert {"muster-watcher", "muster-waits"} <= set(threads())
        dist.destroy_process_group()
        assert not {"muster-watcher", "muster-waits"} & set(threads())
        with pytest.raises(dist.DistError):
            dist.all_reduce(torch.ones(2), group=kept)

    run_ranks(2, body)


# spec: H2 SIGSTOP of a rank on this host is named by all, and heartbeat_timeout is an argument
def test_a_stopped_rank_is_named():
    name = meeting_file()
    victim = fork.Value("i", 0)

    def body(rank):
        join(name, rank, 3, heartbeat_timeout=datetime.timedelta(minutes=10))
        dist.all_reduce(torch.ones(2))
        if rank == 2:
            victim.value = os.getpid()
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        with pytest.raises(dist.DistBackendError, match="rank 2 has not answered.*stopped"):
            dist.all_reduce(torch.ones(2))
        if rank == 0:
            os.kill(victim.value, signal.SIGKILL)

    run_ranks(3, body, killed=(2,))


def test_a_negative_heartbeat_timeout_is_refused():
    with pytest.raises(ValueError, match="heartbeat_timeout is negative"):
        join(meeting_file(), 0, 1, heartbeat_timeout=datetime.timedelta(seconds=-1))
