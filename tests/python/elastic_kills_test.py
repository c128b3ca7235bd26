# SPDX-License-Identifier: BSD-3-Clause
"""Workers, agents and whole hosts die at seeded moments, one after the other: `muster run --elastic
keep` loses no committed step, and the weights have the bits of a run that nobody disturbs.
"""

import collections
import os
import random
import signal

import pytest
from elastic_jobs import LONG, TRAINER, Launcher, replace_killed, train, weights
from etcd_server import etcd_server

JOBS = 5 if LONG else 1
KILLS = 20 if LONG else 4
STEPS = 2 * KILLS + 2
PHASES = ("begin", "forward", "backward", "update", "commit")
VICTIMS = ("worker", "worker", "agent", "host")
RANKS = 4  # on two nodes


@pytest.fixture(scope="module")
def undisturbed():
    return weights(train(ranks=RANKS, steps=STEPS).out, RANKS)


@pytest.fixture(scope="module")
def etcd():
    with etcd_server() as endpoint:
        yield endpoint.removeprefix("http://")


def kills_of(seed):
    """One for each epoch. Every kind of victim is among them."""
    chance = random.Random(seed)
    victims = list(dict.fromkeys(VICTIMS))
    victims += [chance.choice(VICTIMS) for _ in range(KILLS - len(victims))]
    chance.shuffle(victims)
    steps = sorted(chance.sample(range(1, STEPS - 1), KILLS))
    return [
        f"{step}:{chance.randrange(RANKS)}:{chance.choice(PHASES)}:{chance.randrange(400)}:{victim}"
        for step, victim in zip(steps, victims, strict=True)
    ]


# spec: L6 kills at seeded moments, of workers, agents and whole hosts, within the optimizer's step
# and during a commit too: no committed step is lost, and the final weights have the bits of the
# undisturbed run; L4 every rank is there with its number in each epoch
@pytest.mark.parametrize("job", range(JOBS))
def test_deaths_lose_nothing(undisturbed, etcd, job, tmp_path, capsys):
    seed = int(os.environ.get("MUSTER_TEST_SEED", "1")) + job
    kills = kills_of(seed)
    options = ["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", etcd]
    options += ["--rdzv-id", f"kills{job}"]
    options += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2"]

    def start():
        words = (TRAINER, str(STEPS), *kills)
        return Launcher(*words, ranks=2, options=options, spares=1, log=tmp_path / "log")

    launchers = replace_killed(start, 2)
    out = (tmp_path / "log").read_text()
    told = f"seed {seed}, kills {kills}\n" + out + "".join(each.told() for each in launchers)
    codes = collections.Counter(each.process.returncode for each in launchers)
    nodes_killed = sum(not kill.endswith("worker") for kill in kills)
    assert codes == {0: 2, -signal.SIGKILL: nodes_killed}, told
    assert out.count("dies at") == KILLS and "LOST" not in out, told
    assert weights(out, RANKS) == undisturbed, told
    for epoch in range(2, KILLS + 2):
        begun = [line for line in out.splitlines() if f"epoch {epoch} from step" in line]
        assert len({line.split(" as ")[1] for line in begun}) == len(begun) > 0, told
    with capsys.disabled():
        print(f"\n{KILLS} kills (seed {seed}): {nodes_killed} of agents and hosts")
