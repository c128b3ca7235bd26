# SPDX-License-Identifier: BSD-3-Clause
"""Replicas are killed at random moments while they meet, and new ones join: those that are left go
on, with the same outer state, and no meeting that one of them has taken is lost.

Each generation of replicas is a job of its own. What a replica takes from one to the next is its
DiLoCo and its parameters.
"""

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

KILLS = 100 if os.environ.get("MUSTER_TEST_LONG") else 4
REPLICAS = 4
SIZES = (30_000, 3, 2_000, 50)
LONGEST_S = 0.12  # of a generation until one is killed
CASES = {
    "plain": {"sync_every": 2},
    "streaming": {"sync_every": 3, "fragments": 2, "delay": 1, "mix": 0.5, "compression": "int8"},
}


class Replica:
    def __init__(self, number, options):
        options = dict(options)
        count = options.pop("fragments", 1)
        self.options = options
        self.parameters = [torch.zeros(size) for size in SIZES]
        self.fragments = [self.parameters[first::count] for first in range(count)]
        self.diloco = None
        self.whole = 0  # meetings of which this replica has had parameters and optimizer's state
        self.draw = torch.Generator().manual_seed(number)

    def enter(self):
        """The default group, after others have left or joined it."""
        if self.diloco is None:
            self.diloco = local_sgd.DiLoCo(self.fragments, **self.options)
        else:
            meetings = self.diloco.meetings
            before = [each.clone() for each in self.parameters]
            self.diloco.set_group(None)
            if self.diloco.meetings == meetings == self.whole:  # its changes are not lost
                assert all(map(torch.equal, self.parameters, before))
        self.whole = self.diloco.meetings

    def step(self):
        for each in self.parameters:
            each += torch.randn(each.shape, generator=self.draw)
        self.diloco.step()
        self.whole = self.diloco.meetings

    def digest(self):
        """Hashes the outer parameters and the outer optimizer's state."""
        digest = hashlib.sha256()
        state = self.diloco.outer_optimizer.state_dict()["state"]
        momentum = [state[key].get("momentum_buffer") for key in sorted(state)]
        for each in (*self.diloco.outer_parameters, *momentum):
            digest.update(b"none" if each is None else each.numpy().tobytes())
        return digest.hexdigest()


def live(number, options, conn):
    """A replica's process: does as the test says, and tells it how that went."""
    os.environ["MUSTER_COMPRESS_WITHIN_HOST"] = "1"
    torch.set_num_threads(1)
    replica = Replica(number, options)
    limit = datetime.timedelta(seconds=LIMIT_S)
    while (word := conn.recv()) is not None:
        rank, size, file = word
        dist.init_process_group(
            init_method="file://" + file, rank=rank, world_size=size, timeout=limit
        )
        conn.send(("begun",))
        try:
            replica.enter()
            conn.send(("met", replica.whole, replica.digest()))
            while True:
                replica.step()
        except dist.DistError:  # one of the others is gone
            conn.send(("failed", replica.whole))
        dist.destroy_process_group()


class Replicas:
    def __init__(self, options, chance):
        self.options, self.chance = options, chance
        self.started = self.newest = self.met = 0
        self.members = []
        for _ in range(REPLICAS):
            self.start()

    def start(self):
        name = f"replica {self.started}"
        self.members.append(ToldProcess(name, live, self.started, self.options))
        self.started += 1

    def generation(self):
        """They meet as often as they can until one is killed."""
        file = meeting_file()
        for rank, member in enumerate(self.members):
            member.conn.send((rank, len(self.members), file))
        for member in self.members:
            assert member.hear() == ("begun",)
        time.sleep(self.chance.uniform(0, LONGEST_S))
        victim = self.members.pop(self.chance.randrange(len(self.members)))
        victim.kill()
        states, meetings = set(), []
        for member in self.members:
            said = member.hear()
            if said[0] == "met":
                states.add(said[1:])
                said = member.hear()
            assert said[0] == "failed"
            meetings.append(said[1])
        assert len(states) <= 1, "the outer states differ"
        for met, _ in states:
            assert met >= self.newest, "a meeting is lost"
            self.met += 1
        # Not of earlier generations: the one that had taken a meeting alone may be the victim.
        self.newest = max(meetings)

    def end(self):
        for member in self.members:
            member.conn.send(None)
        for member in self.members:
            member.process.join(LIMIT_S)
            assert member.process.exitcode == 0


# spec: X3.joiners replicas are killed and others join at random moments of meetings: no hang, the
# same outer state on all that are left, and none of its meetings lost
@pytest.mark.parametrize("case", CASES)
def test_replicas_come_and_go(case, capsys):
    seed = int(os.environ.get("MUSTER_TEST_SEED", "1"))
    replicas = Replicas(CASES[case], random.Random(seed))
    try:
        for _ in range(KILLS):
            replicas.generation()
            replicas.start()
        replicas.members.pop().kill()  # it has not met the others
        replicas.end()
    finally:
        for member in replicas.members:
            member.process.kill()
    with capsys.disabled():
        print(
            f"\n{case}, seed {seed}: {KILLS} kills and joins, {replicas.newest} meetings, "
            f"{replicas.met} generations of one state"
        )
