# SPDX-License-Identifier: BSD-3-Clause
"""Groups that fail while every process lives: a rank stands still and goes on, a link between two
nodes is cut while all reach the membership. The job goes on from its last commit with the same
processes.
"""

import json
import os
import pathlib
import re
import signal
import time

import pytest
from elastic_jobs import Launcher
from elastic_pauses_test import PROGRAM, TRIES, paused_job
from linked_hosts import linked_hosts
from scratch import reserve_port


def ranks_of(launcher):
    """The processes that it has started, in the order of their starts."""
    text = pathlib.Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children")
    return [int(pid) for pid in text.read_text().split()]


def events_of(folder, job, kind):
    lines = [line for path in sorted(folder.glob(f"{job}-*")) for line in path.open()]
    return [each for each in map(json.loads, lines) if each["event"] == kind]


def stand_still(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)  # the fault itself
    os.kill(pid, signal.SIGCONT)


# spec: L15, L14.rank a rank that stands still for longer than the others wait for it, and goes on:
# a new epoch of the same ranks, in the same processes, from the last commit
@pytest.mark.parametrize("attempt", range(TRIES))
def test_a_rank_stands_still(tmp_path, attempt):
    endpoint = f"127.0.0.1:{reserve_port()}"
    job = f"job{attempt}"
    with paused_job(tmp_path, "c10d", endpoint, 3, job) as running:
        before = [ranks_of(node) for node in running.nodes]
        stand_still(before[1][0], 6)
        out, told = running.finish(after_epoch=1)
        assert out.count("epoch 2 from step") == 3, told
        assert "epoch 3 from step" not in out, told
        assert len(events_of(tmp_path, job, "group_failed")) >= 2, told
        begun = events_of(tmp_path, job, "workers_started")
        assert {each["restarts"] for each in begun} == {0}, told
        assert all("no process has ended" in each["reason"] for each in begun if each["epoch"] == 2)
        assert "; the same nodes go on; of the workers here 1 stay" in told, told


# spec: L15, L14.rank the same where all ranks have one launcher
def test_a_rank_of_one_node_stands_still(tmp_path):
    end = tmp_path / "end"
    launcher = Launcher(PROGRAM, str(end), ranks=3)
    launcher.read_until("step 50 of epoch 1", times=3)
    stand_still(ranks_of(launcher)[1], 6)
    launcher.read_until("step 50", times=3)
    end.touch()
    assert launcher.end() == 0, launcher.told()
    assert "LOST" not in launcher.out, launcher.told()
    assert launcher.out.count("epoch 2 from step") == 3, launcher.told()
    assert "of the workers here 3 stay" in launcher.err, launcher.told()


# spec: L15, L14.rank a rank that stays stopped is replaced, by its time: the others go on
def test_a_rank_stays_stopped(tmp_path):
    end = tmp_path / "end"
    options = ["--standalone", "--rdzv-conf", "stopped_timeout=2"]
    launcher = Launcher(PROGRAM, str(end), ranks=3, options=options)
    launcher.read_until("step 50 of epoch 1", times=3)
    os.kill(ranks_of(launcher)[1], signal.SIGSTOP)
    launcher.read_until("of epoch 3 at", times=3)
    end.touch()
    assert launcher.end() == 0, launcher.told()
    assert "LOST" not in launcher.out, launcher.told()
    assert "rank 1 has been stopped for 2 s" in launcher.err, launcher.told()
    assert "of the workers here 2 stay" in launcher.err, launcher.told()


# spec: L15, L14.link two nodes that cannot reach each other for some seconds while both reach the
# membership and a third node: the same ranks go on when the link is there again
@pytest.mark.parametrize("attempt", range(TRIES))
def test_a_link_is_cut_for_a_time(tmp_path, attempt):
    job = f"job{attempt}"
    with (
        linked_hosts(3) as hosts,
        paused_job(tmp_path, "c10d", f"{hosts.address(0)}:29400", 3, job, hosts) as running,
    ):
        hosts.cut(1, 2)
        time.sleep(14)  # the fault itself: a peer counts as failed after 10 s
        hosts.mend(1, 2)
        out, told = running.finish(after_epoch=1)
        assert out.count("epoch 2 from step") == 3, told
        assert "epoch 3 from step" not in out, told
        assert told.count("of the workers here 1 stay") == 3, told


# spec: L15, L14.link a link that stays cut costs one of its nodes, and no step: the others go on
def test_a_link_stays_cut(tmp_path):
    with (
        linked_hosts(3) as hosts,
        paused_job(tmp_path, "c10d", f"{hosts.address(0)}:29400", 3, "job", hosts) as running,
    ):
        hosts.cut(1, 2)
        running.nodes[0].read_until("of epoch 3 at")
        running.end.touch()
        codes = [node.end() for node in running.nodes]
        told = "".join(node.told() for node in running.nodes)
        assert codes == [0, 0, 0], told
        out = "".join(node.out for node in running.nodes)
        assert len(re.findall(r"epoch 3 from step \d+ of 2\n", out)) == 2, told
        assert "LOST" not in out, told
        assert "; the others go on without node" in told, told


SLOW_END = """
import atexit, time
import torch
import muster as dist
from muster import elastic

state = elastic.State(step=0)


def train():
    print("epoch", elastic.epoch(), "from step", state.step, flush=True)
    while state.step < 40:
        if state.step == 20 and elastic.epoch() == 1 and dist.get_rank() == 1:
            atexit.register(time.sleep, 5)  # the fault itself
            raise RuntimeError("an error of its own")
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()


print(elastic.run(state, train), "at step", state.step, flush=True)
"""


# spec: L15 a rank that raises, whose process then needs seconds to end, is one failure: no epoch of
# the same ranks comes before its exit
def test_a_rank_fails_slowly(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SLOW_END)
    launcher = Launcher(str(program), ranks=3)
    assert launcher.end() == 0, launcher.told()
    assert launcher.out.count("epoch 2 from step 20") == 3, launcher.told()
    assert "epoch 3" not in launcher.out, launcher.told()
    assert launcher.out.count("finished at step 40") == 3, launcher.told()
    assert "no process has ended" not in launcher.err, launcher.told()
