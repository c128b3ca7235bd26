# SPDX-License-Identifier: BSD-3-Clause
"""A replica joins others that train on, and it or one of them is killed at a random moment."""

import datetime
import hashlib
import os
import random
import time

import pytest
import torch
from ranks import LIMIT_S, meeting_file
from told_process import ToldProcess

import muster as dist
from muster import local_sgd

KILLS = 25 if os.environ.get("MUSTER_TEST_LONG") else 2
SYNC_EVERY = 4
SIZES = (30_000, 3, 2_000)
STEP_S = 0.0005  # that a step computes
LONGEST_S = 0.15  # until one is killed
OPTIONS = {"sync_every": SYNC_EVERY, "fragments": 2, "delay": 1, "mix": 0.5, "compression": "int8"}


class Training:
    """One replica's part. The last rank of the job joins the others."""

    def __init__(self, rank, replicas, file):
        torch.set_num_threads(1)
        dist.init_process_group(
            init_method="file://" + file,
            rank=rank,
            world_size=replicas + 1,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
        self.trains = rank < replicas
        self.replicas = replicas
        self.parameters = [torch.zeros(size) for size in SIZES]
        self.groups = {None: dist.new_group(list(range(replicas)))}
        self.wider = dist.new_group()
        for lost in range(replicas):  # those that are left
            self.groups[lost] = dist.new_group([each for each in range(replicas) if each != lost])
        self.draw = torch.Generator().manual_seed(rank)
        self.diloco = None

    def begin(self):
        options = dict(OPTIONS)
        count = options.pop("fragments")
        fragments = [self.parameters[first::count] for first in range(count)]
        group = self.groups[None] if self.trains else self.wider
        joins = not self.trains
        self.diloco = local_sgd.DiLoCo(fragments, group=group, joins=joins, **options)

    def step(self):
        for each in self.parameters:
            each += torch.randn(each.shape, generator=self.draw)
        time.sleep(STEP_S)
        self.diloco.step()

    def has_entered(self):
        return dist.get_world_size(self.diloco.group) > self.replicas

    def digest(self):
        """Hashes the outer parameters and the outer optimizer's state."""
        digest = hashlib.sha256()
        state = self.diloco.outer_optimizer.state_dict()["state"]
        momentum = [state[key]["momentum_buffer"] for key in sorted(state)]
        for each in (*self.diloco.outer_parameters, *momentum):
            digest.update(each.numpy().tobytes())
        return digest.hexdigest()


def train(rank, replicas, lost, file, conn):
    """One rank that is not killed trains to the end, and for a few meetings more."""
    os.environ["MUSTER_COMPRESS_WITHIN_HOST"] = "1"
    training = Training(rank, replicas, file)
    if training.trains:
        training.begin()
    conn.send(("begun",))
    entered = failed = False
    try:
        if training.trains:
            training.diloco.admit(training.wider)
        else:
            training.begin()
        while training.diloco.is_admitting or training.has_entered() or lost is not None:
            entered = entered or training.has_entered()
            training.step()
    except dist.DistError:
        failed = True
    if training.trains:
        met = training.diloco.meetings
        if failed:
            training.diloco.set_group(training.groups[lost])
        assert training.diloco.meetings >= met, "a meeting is lost"
        for _ in range(3 * SYNC_EVERY):
            training.step()
        assert training.diloco.meetings > met
        conn.send(("met", training.diloco.meetings, training.digest(), entered))
    else:
        conn.send(("ended", entered))
    conn.recv()  # until all have said so
    try:
        dist.destroy_process_group()
    except dist.DistError:  # the first to say that one was killed, if its admission was over
        pass


# spec: X3.joiners where a new replica, or one that it takes its state from, is killed at any moment
# of its coming, those that are left go on with the same outer state, and have lost no meeting
@pytest.mark.parametrize("killed", ["joiner", "sender"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_one_is_killed_while_another_joins(replicas, killed, capsys):
    seed = int(os.environ.get("MUSTER_TEST_SEED", "1"))
    chance = random.Random(f"{seed} {replicas} {killed}")
    times_entered = 0
    for _ in range(KILLS):
        file = meeting_file()
        victim = replicas if killed == "joiner" else chance.randrange(replicas)
        lost = None if killed == "joiner" else victim
        ranks = [
            ToldProcess(f"rank {rank}", train, rank, replicas, lost, file)
            for rank in range(replicas + 1)
        ]
        try:
            for rank in ranks:
                assert rank.hear() == ("begun",)
            time.sleep(chance.uniform(0, LONGEST_S))
            ranks.pop(victim).kill()
            said = [rank.hear() for rank in ranks]
            states = {each[1:3] for each in said if each[0] == "met"}
            assert len(states) == 1, "the outer states differ"
            times_entered += any(each[-1] for each in said)
            for rank in ranks:
                rank.conn.send(None)
            for rank in ranks:
                rank.process.join(LIMIT_S)
                assert rank.process.exitcode == 0
        finally:
            for rank in ranks:
                rank.process.kill()
    with capsys.disabled():
        print(
            f"\n{replicas} replicas, seed {seed}: {KILLS} times the {killed} was killed, "
            f"{times_entered} times the new one had entered"
        )
