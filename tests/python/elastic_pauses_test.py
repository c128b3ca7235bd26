# SPDX-License-Identifier: BSD-3-Clause
"""Jobs in which something stands still for some seconds and goes on: launchers, etcd or its leader.
No committed step is lost. `make test-long` does each twenty times.
"""

import contextlib
import os
import re
import signal
import time

import pytest
from elastic_jobs import LONG, Launcher
from etcd_server import etcd_cluster
from scratch import LIMIT_S, reserve_port

TRIES = 20 if LONG else 1
PROGRAM = os.path.join(os.path.dirname(__file__), "paused_program.py")


class PausedJob:
    """A job of some nodes with one rank each, whose lease is 5 s, or as given: a busy machine alone
    must not end it. Each is on a host of its own, if there are.
    """

    def __init__(
        self, tmp_path, kind, endpoint, nodes, job, hosts=None, conf="", options=(), lease=5
    ):
        self.end = tmp_path / job
        self.nodes = []
        patience = f"last_call_timeout=3600,keep_alive_interval={lease / 5:g}"
        patience += ",keep_alive_max_attempt=5" + conf
        self.options = ["--nnodes", f"1:{nodes}", "--rdzv-backend", kind, "--rdzv-id", job]
        self.options += ["--rdzv-endpoint", endpoint, "--rdzv-conf", patience, *options]
        for number in range(nodes):
            self.start(number, hosts.inside(number) if hosts else ())

    def start(self, number, inside=()):
        options = [*self.options, "--events", f"{self.end}-{number}"]
        launcher = Launcher(PROGRAM, str(self.end), ranks=1, options=options, inside=inside)
        self.nodes.append(launcher)
        return launcher

    def until_it_trains(self):
        for node in self.nodes:
            node.read_until("step 50 of epoch")

    def until_said(self, text, nodes=None):
        """Until one of the nodes' launchers, of all by default, has said it."""
        limit = time.monotonic() + LIMIT_S
        while not any(text in node.err for node in nodes or self.nodes):
            if time.monotonic() > limit:
                pytest.fail(f"never said: {text}\n" + "".join(node.told() for node in self.nodes))
            time.sleep(0.05)

    def until_begun(self, number, epoch):
        """Until the launcher of that node has begun the epoch."""
        events = self.end.with_name(f"{self.end.name}-{number}")
        limit = time.monotonic() + LIMIT_S
        while not events.exists() or f'"epoch":{epoch},' not in events.read_text():
            if time.monotonic() > limit:
                pytest.fail(f"epoch {epoch} never begins\n{self.nodes[number].told()}")
            time.sleep(0.05)

    @contextlib.contextmanager
    def second_without_commits(self):
        """Of two nodes the second one has joined again. Its worker begins at the end of this
        context.
        """
        first, second = self.nodes
        hold = self.end.with_suffix(".hold")
        hold.touch()
        second.process.send_signal(signal.SIGSTOP)
        first.read_until("of epoch 2 at")
        second.process.send_signal(signal.SIGCONT)
        self.until_said("(epoch 3,", [second])
        yield first, second
        hold.unlink()

    def finish(self, after_epoch=0):
        """What all ranks printed, once they have ended well. Call it when the pause is over, and
        say which epoch must have ended by it.
        """
        # A node that the others went on without has joined them again before the end.
        over = time.monotonic()
        for node in self.nodes:
            self._until_it_steps(node, over, after_epoch)
        self.end.touch()
        codes = [node.end() for node in self.nodes]
        told = "".join(node.told() for node in self.nodes)
        assert codes == [0] * len(codes), told
        out = "".join(node.out for node in self.nodes)
        assert "LOST" not in out, told
        assert len(set(re.findall(r"finished at step \d+ with \w+", out))) == 1, told
        # No epoch goes back behind a step that some rank has said to be committed before it.
        steps = r"step (\d+) of epoch (\d+) at"
        for epoch, start in re.findall(r"epoch (\d+) from step (\d+)", out):
            before = [int(step) for step, of in re.findall(steps, out) if int(of) < int(epoch)]
            assert int(start) >= max(before, default=0), told
        assert not re.search("of the job (is|are|may be) lost", told), told
        return out, told

    def _until_it_steps(self, node, over, after_epoch):
        """Until a rank of the node makes a step, later than `over`, or has ended."""
        try:
            while line := node.next_line(over + LIMIT_S):
                said = re.search(r"step \d+ of epoch (\d+) at ([\d.]+)", line)
                if said and float(said[2]) > over and int(said[1]) > after_epoch:
                    return
        except TimeoutError:
            words = "".join(each.told() for each in self.nodes)
            pytest.fail(f"no step after epoch {after_epoch} within {LIMIT_S} s\n{words}")

    def kill(self):
        for node in self.nodes:
            print(node.told())  # pytest shows it if the test has failed


@contextlib.contextmanager
def paused_job(*arguments, **options):
    job = PausedJob(*arguments, **options)
    try:
        job.until_it_trains()
        yield job
    finally:
        job.kill()


# spec: L14.service etcd stands still for longer than every lease: all healthy nodes keep their
# workers, and the epoch stays
@pytest.mark.parametrize("attempt", range(TRIES))
def test_all_of_etcd_stands_still(tmp_path, attempt):
    with (
        etcd_cluster(1) as etcd,
        paused_job(tmp_path, "etcd", etcd.endpoints(), 3, f"job{attempt}") as job,
    ):
        etcd.signal(signal.SIGSTOP)
        time.sleep(9)  # the fault itself
        etcd.signal(signal.SIGCONT)
        out, told = job.finish()
        assert "epoch 2 from step" not in out, told


# spec: L14.service, L14.end etcd stands still for longer than workers go on without it: they end,
# and the job goes on from the last commit that they gave to their launchers
@pytest.mark.parametrize("attempt", range(TRIES))
def test_etcd_stands_still_for_longer_than_the_workers_wait(tmp_path, attempt):
    conf = ",service_timeout=3"
    with (
        etcd_cluster(1) as etcd,
        paused_job(
            tmp_path, "etcd", etcd.endpoints(), 2, f"job{attempt}", conf=conf, lease=15
        ) as job,
    ):
        etcd.signal(signal.SIGSTOP)
        for node in job.nodes:
            job.until_said("this node ends its workers", [node])
        etcd.signal(signal.SIGCONT)  # the launchers leave the job a lease later
        out, told = job.finish(after_epoch=1)
        assert re.search(r"epoch [2-9] from step \d\d", out), told


# spec: L14.service etcd's leader stands still: another is elected, and no node ends its workers; no
# step is lost when it goes on, though a leader of etcd before 3.4.29 and 3.5.11 then revokes leases
# that the next one has renewed
@pytest.mark.parametrize("attempt", range(TRIES))
def test_the_leader_of_etcd_stands_still(tmp_path, attempt):
    with (
        etcd_cluster(3) as etcd,
        paused_job(tmp_path, "etcd", etcd.endpoints(), 3, f"job{attempt}") as job,
    ):
        leader = etcd.leader()
        etcd.signal(signal.SIGSTOP, leader)
        time.sleep(12)  # the fault itself
        over = time.monotonic()
        etcd.signal(signal.SIGCONT, leader)
        time.sleep(2)  # the fault itself: a leader that was one goes on
        out, told = job.finish()
        steps = re.findall(r"of epoch (\d+) at ([\d.]+)", out)
        assert {epoch for epoch, at in steps if float(at) < over} == {"1"}, told


# spec: L14.node a launcher that stands still for longer than its lease comes back, also the one
# that serves the membership
@pytest.mark.parametrize("attempt", range(TRIES))
@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_stands_still(tmp_path, number, attempt):
    endpoint = f"127.0.0.1:{reserve_port()}"
    with paused_job(tmp_path, "c10d", endpoint, 2, f"job{attempt}") as job:
        job.nodes[number].process.send_signal(signal.SIGSTOP)
        time.sleep(12)  # the fault itself
        job.nodes[number].process.send_signal(signal.SIGCONT)
        job.until_said("lost its place in the job")
        job.finish()


# spec: L14.node the only node with the job's commits falls silent before the other one, which has
# just joined, has got them: that one waits, and nothing is lost
@pytest.mark.parametrize("attempt", range(TRIES))
def test_the_last_node_with_the_commits_is_waited_for(tmp_path, attempt):
    with (
        etcd_cluster(1) as etcd,
        paused_job(tmp_path, "etcd", etcd.endpoints(), 2, f"job{attempt}") as job,
    ):
        with job.second_without_commits() as (first, second):
            first.process.send_signal(signal.SIGSTOP)
            job.until_said("no node that is left has the job's state in memory", [second])
            first.process.send_signal(signal.SIGCONT)
        out, told = job.finish()
        assert "epoch 3 from step" in out, told
        assert "epoch 4 from step" not in out, told


# spec: L14.node, L14.lost_state the only node with the job's last commits dies before the other
# one, which the job had left out and which has joined again, has got them: that one goes on from
# the last commit of its workers before, and says how many are lost
@pytest.mark.parametrize("attempt", range(TRIES))
def test_the_commits_of_a_node_that_was_left_out_are_a_source(tmp_path, attempt):
    conf = ",service_timeout=1"
    with (
        etcd_cluster(1) as etcd,
        paused_job(tmp_path, "etcd", etcd.endpoints(), 2, f"job{attempt}", conf=conf) as job,
    ):
        with job.second_without_commits() as (first, second):
            first.process.kill()
            job.until_said("(epoch 4,", [second])
        second.read_until(" of epoch 4 at")
        job.end.touch()
        assert second.end() == 0, second.told()
        begun = re.search(r"epoch 4 from step (\d+)", second.out)
        assert begun and int(begun[1]) >= 50, second.told()
        lost = re.search(
            r"of the (\d+) or more that were made before no rank of epoch 4 has one after commit "
            r"(\d+)",
            second.err,
        )
        assert lost and int(lost[1]) > int(lost[2]) == int(begun[1]), second.told()
        assert "state of the job is lost" not in second.err, second.told()


# spec: L14.node, L14.lost_state the only node of an epoch dies with the commits that it has made in
# it before the one that was left out has joined again: that one cannot know how many there were,
# and says so, or ends the job where that is to be
@pytest.mark.parametrize("attempt", range(TRIES))
@pytest.mark.parametrize("action", ["restart", "fail"])
def test_commits_of_which_nobody_has_heard_may_be_lost(tmp_path, action, attempt):
    conf = ",service_timeout=1"
    with (
        etcd_cluster(1) as etcd,
        paused_job(
            tmp_path,
            "etcd",
            etcd.endpoints(),
            2,
            f"job{attempt}",
            conf=conf,
            options=["--on-lost-state", action],
        ) as job,
    ):
        first, second = job.nodes
        second.process.send_signal(signal.SIGSTOP)
        first.read_until("of epoch 2 at")
        first.read_until("of epoch 2 at")
        first.process.kill()
        second.process.send_signal(signal.SIGCONT)
        if action == "restart":
            second.read_until(" of epoch 3 at")
        job.end.touch()
        assert second.end() == (0 if action == "restart" else 1), second.told()
        lost = re.search(
            r"commits of the job (may be|are) lost: .*no rank of epoch 3 .*after commit (\d+)",
            second.err,
        )
        assert lost and int(lost[2]) >= 50, second.told()
        if action == "restart":
            assert f"epoch 3 from step {lost[2]}" in second.out, second.told()


# spec: L14.lost_state the only node with the job's commits dies before the other one, which is new,
# has got them: that one knows that there were some, and says that they are lost
def test_a_node_that_joins_knows_of_commits_that_are_lost(tmp_path):
    with (
        etcd_cluster(1) as etcd,
        paused_job(tmp_path, "etcd", etcd.endpoints(), 2, "job", conf=",service_timeout=1") as job,
    ):
        first, second = job.nodes
        hold = job.end.with_suffix(".hold")
        hold.touch()
        second.process.kill()
        first.read_until("of epoch 2 at")
        third = job.start(2)
        job.until_begun(2, epoch=3)
        first.process.kill()
        job.until_said("(epoch 4,", [third])
        hold.unlink()
        third.read_until("step 50 of epoch 4")
        job.end.touch()
        assert third.end() == 0, third.told()
        lost = re.search(r"no rank of epoch 4 has any of the (\d+) commits?\b", third.err)
        assert lost and int(lost[1]) >= 50, third.told()


# A wait for words has an end, and a test that fails by it shows all that was said.
def test_a_wait_for_words_ends_while_others_are_said():
    words = ["/bin/sh", "-c", "while :; do echo others; sleep 0.01; done"]
    launcher = Launcher(*words, ranks=1)
    launcher.read_until("others")
    said = r"not said within 1 s: these\n(.*\n)*\[0\] others"
    with pytest.raises(pytest.fail.Exception, match=said):
        launcher.read_until("these", limit=1)
    assert launcher.process.returncode is not None


# spec: L16.arguments, L16.program another program, or the same with other arguments, under the id
# of a job that runs is refused by name, and the job goes on
def test_another_program_is_refused(tmp_path):
    endpoint = f"127.0.0.1:{reserve_port()}"
    with paused_job(tmp_path, "c10d", endpoint, 2, "job") as job:
        for words in (["/bin/true"], [PROGRAM, str(tmp_path / "elsewhere")]):
            options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
            other = Launcher(*words, ranks=1, options=[*options, "--rdzv-endpoint", endpoint])
            assert other.end() == 1, other.told()
            assert 'of the same job "job" with ' in other.err, other.told()
            expected = "other arguments" if words[0] == PROGRAM else "paused_program.py"
            assert expected in other.err, other.told()
        out, told = job.finish()
        assert "epoch 2" not in out, told
