# SPDX-License-Identifier: BSD-3-Clause
"""`muster run --elastic keep` with state that no peer holds: FSDP's shards and ZeRO's parts outlive
their ranks, all ranks of a node, and the loss of a host. The program is
tests/elastic/sharded_trainer.cc.
"""

import collections
import contextlib
import os
import pathlib
import random
import re
import signal
import time

import pytest
import torch
from elastic_jobs import BIN, LONG, Launcher, rendezvous, replace_killed, server_of, weights
from etcd_server import etcd_server
from scratch import LIMIT_S, reserve_port

from muster import elastic

TRAINER = str(BIN / "sharded_trainer")
MODES = ("fsdp", "zero")
STEPS = 24
JOBS = 5 if LONG else 1
KILLS = 12 if LONG else 4
PHASES = ("begin", "forward", "backward", "update", "commit")
VICTIMS = ("worker", "agent", "host")


def train(mode, *kills, ranks=3, spares=0):
    launcher = Launcher(TRAINER, mode, str(STEPS), *kills, ranks=ranks, spares=spares)
    assert launcher.end() == 0, launcher.out + launcher.err
    return launcher


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def undisturbed():
    """The results of so many ranks: both modes compute the same."""
    return {ranks: weights(train("fsdp", ranks=ranks).out, ranks) for ranks in (3, 4)}


@pytest.fixture(scope="module")
def etcd():
    with etcd_server() as endpoint:
        yield endpoint.removeprefix("http://")


# spec: L7 ranks are killed one after the other, within the optimizer's step, during a commit and
# while the shards of the epoch before are restored: a new process finds the dead one's shards
@pytest.mark.sampled(1)
def test_killed_ranks(undisturbed, mode):
    kills = ("4:1:update:20:worker", "6:2:commit:60:worker", "6:0:begin:1000:worker")
    ran = train(mode, *kills, "11:1:backward:0:worker", "11:1:commit:200:worker")
    told = ran.out + ran.err
    assert ran.out.count("dies at") == 5 and "LOST" not in ran.out, told
    assert weights(ran.out, 3) == undisturbed[3], told
    assert ran.err.count("1 start anew") >= 5, told


# spec: L7 L8 a spare gets the shards of the rank that it replaces
@pytest.mark.sampled(1)
def test_spares(undisturbed, mode):
    ran = train(mode, "7:2:commit:30:worker", "8:0:update:10:worker", spares=1)
    told = ran.out + ran.err
    assert weights(ran.out, 3) == undisturbed[3] and "LOST" not in ran.out, told
    assert ran.err.count("1 are spares that step in") == 2, told


# spec: L7 all ranks of the job are killed at once, and its launcher lives: nothing is lost
@pytest.mark.sampled(1)
def test_all_ranks_of_a_node(undisturbed, mode):
    ran = train(mode, "7:1:update:0:workers", "9:0:commit:50:workers", "9:2:begin:500:workers")
    told = ran.out + ran.err
    assert weights(ran.out, 3) == undisturbed[3], told
    begun = {int(each) for each in re.findall(r"epoch \d+ from step (\d+)", ran.out)}
    assert begun <= {0, 7, 9, 10}, told


# spec: L7 the state of a lost host comes from its partner: hosts, agents, and all or single workers
# die at seeded moments, one after the other
@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", range(JOBS))
def test_lost_hosts(undisturbed, mode, etcd, job, tmp_path, capsys):
    seed = int(os.environ.get("MUSTER_TEST_SEED", "1")) + job
    chance = random.Random(f"{seed} {mode}")
    victims = list(VICTIMS) + [chance.choice(VICTIMS) for _ in range(KILLS - len(VICTIMS) - 1)]
    chance.shuffle(victims)
    # They are missed one by one, in several epochs, and a kill whose epoch makes no step is none.
    victims.append("workers")
    steps = sorted(chance.sample(range(1, STEPS - 1), KILLS))

    def kill_of(step, victim):
        # A host that is lost before its partner has been restored is one of two at once.
        phase = chance.choice(PHASES if "worker" in victim else PHASES[1:])
        return f"{step}:{chance.randrange(4)}:{phase}:{chance.randrange(400)}:{victim}"

    kills = [kill_of(*each) for each in zip(steps, victims, strict=True)]
    options = rendezvous("etcd", etcd, f"{mode}{job}", "2")

    def start():
        words = (TRAINER, mode, str(STEPS), *kills)
        return Launcher(*words, ranks=2, options=options, spares=1, log=tmp_path / "log")

    launchers = replace_killed(start, 2)
    out = (tmp_path / "log").read_text()
    told = f"seed {seed}, kills {kills}\n" + out + "".join(each.told() for each in launchers)
    codes = collections.Counter(each.process.returncode for each in launchers)
    assert codes[0] == 2 and set(codes) == {0, -signal.SIGKILL}, told
    assert out.count("dies at") >= 2 and "LOST" not in out, told
    assert weights(out, 4) == undisturbed[4], told
    with capsys.disabled():
        print(f"\n{mode}: {out.count('dies at')} kills (seed {seed}): {victims}")


# spec: L7 two hosts are lost at once, of which one kept the other's copy: every rank throws, saying
# what is lost and what to do, and the job begins again with what the program loads
def test_two_hosts_lost_at_once(etcd):
    options = rendezvous("etcd", etcd, "neighbours", "3")

    def start():
        return Launcher(TRAINER, "fsdp", "100000000", ranks=1, options=options)

    nodes = [start() for _ in range(3)]
    for each in nodes:
        each.read_until("epoch 1 from step 0")
    for each in nodes:
        each.read_until("commits 50")
    ranks = [int(re.search(r"as (\d) of 3", each.out)[1]) for each in nodes]
    survivor = nodes.pop(ranks.index(0))
    for each in nodes:
        each.process.kill()
    ended = [each.told() for each in nodes]
    nodes = [start(), start()]
    for each in (survivor, *nodes):
        each.read_until("failed: elastic::ShardedState: commit ")
        assert "what rank 1 of 3 had is gone" in each.out, (ended, each.told())
        assert "load the last checkpoint before elastic::run" in each.out, each.told()
    survivor.read_until("from step 0 as 0 of 3")
    for each in (survivor, *nodes):
        each.told()


def commit_files_of(process):
    """Those that it holds."""
    folder = pathlib.Path(f"/proc/{process.pid}/fd")
    names = []
    for each in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(each))
    return sum("muster-commit" in name for name in names)


# spec: L7 L10 a node is lost and nobody replaces it, then another comes, and leaves after a commit:
# fewer and more ranks get the shards that the ones before had
@pytest.mark.sampled(1)
def test_fewer_and_more_ranks(mode):
    port = reserve_port()
    words = (TRAINER, mode, "100000000")
    options = rendezvous("c10d", f"127.0.0.1:{port}", mode)
    first = server_of(port, mode, *words)
    second = Launcher(*words, ranks=3, options=options)
    first.read_until("of 5\n", 2)
    first.read_until("commits 50")
    second.process.kill()
    first.read_until("of 2\n", 2)
    first.read_until("commits 50")
    # Two of each rank: once there is a commit, what the epoch before has left is given up.
    limit = time.monotonic() + LIMIT_S
    while commit_files_of(first.process) != 4:
        assert time.monotonic() < limit, commit_files_of(first.process)
    third = Launcher(*words, ranks=1, options=options)
    first.read_until("of 3\n", 2)
    third.read_until("of 3\n")
    first.read_until("commits 50")
    third.process.send_signal(signal.SIGTERM)
    assert third.end() == 128 + signal.SIGTERM, third.told()
    first.read_until("of 2\n", 2)
    first.read_until("commits 50")
    first.process.send_signal(signal.SIGTERM)
    first.end()
    assert "LOST" not in first.out and "failed" not in first.out, first.out + first.err
    begun = [int(each) for each in re.findall(r"epoch \d+ from step (\d+)", first.out)]
    assert begun[-1] >= 150 and first.out.count("preempted at step") == 2, first.out + first.err
    second.end()


# spec: L7 muster.elastic.ShardedState: the same from Python, with a scheduler, of muster.fsdp in
# both its forms and of ZeroRedundancyOptimizer; ranks die one by one, and all of them at once
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["fsdp", "fully_shard", "zero"])
def test_python(form):
    program = str(pathlib.Path(__file__).with_name("sharded_program.py"))

    def trained(*kills, spares=0):
        ran = Launcher(program, form, "10", *kills, ranks=2, spares=spares)
        assert ran.end() == 0, ran.out + ran.err
        assert "LOST" not in ran.out and ran.out.count("dies") == len(kills), ran.out + ran.err
        return weights(ran.out, 2)

    killed = trained("3:1:update", "3:0:restore", "6:0:commit", "8:1:node", spares=1)
    assert killed == trained()


# spec: L7 in Python too: what a program does wrong is said
def test_python_refusals():
    class FSDPModule(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match="give it to an elastic.ShardedState inside"):
        elastic.State(model=FSDPModule())
    state = elastic.State(step=0)
    elastic.ShardedState(state)
    with pytest.raises(ValueError, match="the State has one already in this epoch"):
        elastic.ShardedState(state)


# spec: L7 a ShardedState outlives no call of the function
def test_python_refuses_what_an_earlier_call_made(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": str(reserve_port())}).items():
        monkeypatch.setenv(name, value)
    state = elastic.State(step=0)
    made = []

    def train():
        made.append(elastic.ShardedState(state, part=torch.ones(2)))
        made[0].restore()
        state.commit()

    assert elastic.run(state, train) == "finished" and state.commits == 2
    with pytest.raises(ValueError, match="that made it has ended; make one in every call"):
        made[0].restore()


# spec: L7 what a program does wrong is said to it: shards that were never restored, or that are not
# bound again
@pytest.mark.parametrize(
    "wrong, said", [("unrestored", "call its restore()"), ("unbound", "nothing sharded is bound")]
)
def test_refusals(wrong, said):
    ran = Launcher(TRAINER, "fsdp", "10", wrong, ranks=2, options=("--standalone",))
    ran.read_until("failed: elastic::State::commit: ")
    assert said in ran.out, ran.out
    ran.told()
