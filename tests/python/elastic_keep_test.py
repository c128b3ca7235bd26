# SPDX-License-Identifier: BSD-3-Clause
"""`muster run --elastic keep`: ranks and nodes die, the others stay, and the weights are those of a
run that nobody disturbs. elastic_kills_test.py does it at seeded moments. The programs are
tests/elastic/elastic_trainer.cc and elastic_program.py.
"""

import collections
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
import torch
from elastic_jobs import (
    LIMIT_S,
    STEPS,
    TRAINER,
    Launcher,
    rendezvous,
    replace_killed,
    server_of,
    train,
    weights,
)
from etcd_server import etcd_server, keys_in
from scratch import reserve_port

from muster import elastic

PAUSED_PROGRAM = os.path.join(os.path.dirname(__file__), "paused_program.py")


@pytest.fixture(scope="module")
def undisturbed():
    return weights(train().out, 3)


# spec: L8 a spare takes the dead rank's place; L6 two ranks die one after the other, the second in
# the epoch that begins because of the first, in the step that is redone: the one that is left has
# everything
def test_spares_step_in(undisturbed):
    ran = train("7:2:backward:0:worker", "7:1:forward:0:worker", spares=2)
    told = ran.out + ran.err
    assert "LOST" not in ran.out, told
    assert weights(ran.out, 3) == undisturbed, told
    assert ran.err.count("2 stay, 1 are spares that step in, 0 start anew") == 2, told


# spec: L6 without a spare a new process takes the place
def test_without_a_spare(undisturbed):
    ran = train("7:2:update:20:worker")
    assert weights(ran.out, 3) == undisturbed, ran.out + ran.err
    assert "2 stay, 0 are spares that step in, 1 start anew" in ran.err, ran.err


def lose_all_ranks(tmp_path, *options):
    """A job all of whose ranks are killed after some commits; gives it and its events."""
    events = tmp_path / "events"
    launcher = Launcher(
        *(TRAINER, str(STEPS), "20:0:forward:0:workers"),
        ranks=2,
        options=("--standalone", "--events", str(events), *options),
    )
    launcher.end()
    return launcher, [json.loads(line) for line in events.read_text().splitlines()]


# spec: L14.lost_state all ranks die at once: the job says how many commits are lost, in its events,
# its log and its report, and trains from the beginning to the end
def test_lost_state_is_told(tmp_path):
    ran, events = lose_all_ranks(tmp_path)
    told = ran.out + ran.err
    assert ran.process.returncode == 0, told
    (lost,) = [each for each in events if each["event"] == "state_lost"]
    assert 1 <= lost["commits"] <= 20, lost
    # The end of one rank may begin an epoch in which the other is still killed.
    assert re.search(
        rf"no rank of epoch [23] has any of the {lost['commits']} commits?\b", lost["what"]
    )
    assert f"muster run: the job has ended well, but on the way {lost['what']}" in ran.err, told
    assert len(re.findall("epoch [23] from step 0", ran.out)) >= 2, told
    order = [each["event"] for each in events]
    assert order.index("state_lost") < order.index("ended"), events


# spec: L14.lost_state --on-lost-state=fail ends the job instead, with an error
def test_lost_state_may_end_the_job(tmp_path):
    ran, events = lose_all_ranks(tmp_path, "--on-lost-state", "fail")
    told = ran.out + ran.err
    assert ran.process.returncode == 1, told
    assert "finished" not in ran.out, told
    assert "state_lost" in [each["event"] for each in events], events
    assert "the job ends, as --on-lost-state fail says" in ran.err, told


# spec: L9 SIGTERM or SIGUSR1 to the launcher: the ranks leave together after a commit, with the
# launcher's usual exit code, and nothing is killed
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preemption(number):
    ran = Launcher(TRAINER, "100000000", ranks=2)
    ran.read_until("epoch 1 from step 0")
    ran.process.send_signal(number)
    assert ran.end() == 128 + number, ran.out + ran.err
    found = re.findall(r"preempted at step (\d+), weights (\w+)", ran.out)
    assert len(found) == 2 and len(set(found)) == 1, ran.out + ran.err


# spec: L6 over two nodes the survivors of both stay; L4 with their ranks
def test_two_nodes():
    options = rendezvous("c10d", f"127.0.0.1:{reserve_port()}", "two")
    kills = ("9:3:update:10:worker", "15:0:commit:10:worker")
    nodes = replace_killed(
        lambda: Launcher(TRAINER, str(STEPS), *kills, ranks=2, options=options), 2
    )
    told = "".join(each.told() for each in nodes)
    out = "".join(each.out for each in nodes)
    assert [each.process.returncode for each in nodes] == [0, 0], told
    assert weights(out, 4) == weights(train(ranks=4).out, 4), told
    assert told.count("2 stay, 0 are spares that step in, 0 start anew") == 2, told
    assert told.count("1 stay, 0 are spares that step in, 1 start anew") == 2, told


# spec: L6 a node dies, another comes: the workers that are left stay all the time; L9 a node
# leaves after a commit, and the other goes on
def test_nodes_come_and_go():
    port = reserve_port()
    first = server_of(port, "visits", TRAINER, "100000000")
    options = rendezvous("c10d", f"127.0.0.1:{port}", "visits")
    second = Launcher(TRAINER, "100000000", ranks=2, options=options)
    first.read_until("from step 0 as", 2)
    second.process.kill()
    first.read_until("of 2\n", 2)
    third = Launcher(TRAINER, "100000000", ranks=2, options=options)
    first.read_until("of 4\n", 2)
    third.read_until("of 4\n", 2)
    third.process.send_signal(signal.SIGTERM)
    assert third.end() == 128 + signal.SIGTERM, third.out + third.err
    assert third.out.count("preempted at step") == 2, third.out + third.err
    assert "got SIGTERM: the workers here leave" in third.err, third.err
    first.read_until("of 2\n", 2)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 128 + signal.SIGTERM, first.out + first.err
    assert len(set(re.findall(r"preempted at step (\d+)", first.out))) == 1, first.out
    assert first.err.count("2 stay, 0 are spares that step in, 0 start anew") == 3, first.err
    assert ") leaves: its launcher was stopped by SIGTERM; of the workers here 2" in first.err
    assert "no process has ended" not in first.err, first.err
    second.end()


# spec: L10 within --repair-timeout a lost node is replaced at the same size: the survivors' next
# epoch has as many ranks as the one before
def test_repair_timeout_waits_for_a_replacement():
    port = reserve_port()
    patient = ["--repair-timeout", "3600"]
    first = server_of(port, "patient", TRAINER, "100000000", more=patient)
    options = rendezvous("c10d", f"127.0.0.1:{port}", "patient") + patient
    second = Launcher(TRAINER, "100000000", ranks=2, options=options)
    first.read_until("epoch 1 from step 0", 2)
    second.process.kill()
    second.end()
    third = Launcher(TRAINER, "100000000", ranks=2, options=options)
    first.read_until("of 4\n", 2)
    assert "of 2\n" not in first.out, first.told()
    first.process.send_signal(signal.SIGTERM)
    first.end()
    third.end()


# spec: L6 the node of rank 0, which serves the workers' store, dies: without etcd that ends the
# job, and the other node says so
def test_death_of_the_node_that_serves():
    port = reserve_port()
    first = server_of(port, "served", TRAINER, "100000000")
    options = rendezvous("c10d", f"127.0.0.1:{port}", "served")
    second = Launcher(TRAINER, "100000000", ranks=2, options=options)
    second.read_until("of 4\n", 2)
    first.process.kill()
    assert second.end() == 1, second.told()
    assert "another node's launcher serves, does not answer any more" in second.err, second.err
    first.end()


# spec: L6 with etcd the job goes on without the node of rank 0: the survivors meet at the store of
# another node, and a replacement takes the dead slot
def test_etcd_survives_the_death_of_rank_zeros_node():
    with etcd_server() as endpoint:
        options = rendezvous("etcd", endpoint.removeprefix("http://"), "zero", "2")
        words = (TRAINER, str(STEPS), "9:0:update:10:host")
        nodes = replace_killed(lambda: Launcher(*words, ranks=2, options=options), 2)
    told = "".join(each.told() for each in nodes)
    out = "".join(each.out for each in nodes)
    codes = [each.process.returncode for each in nodes]
    assert codes == [-signal.SIGKILL, 0, 0], told
    assert "LOST" not in out, told
    assert weights(out, 4) == weights(train(ranks=4).out, 4), told
    assert told.count("2 stay, 0 are spares that step in, 0 start anew") == 1, told


# spec: L6 muster.elastic.State: the same from Python, with a scheduler and values
def test_python():
    program = str(pathlib.Path(__file__).with_name("elastic_program.py"))

    def trained(*kills):
        ran = Launcher(program, "10", *kills, ranks=2, spares=len(kills))
        assert ran.end() == 0, ran.out + ran.err
        assert "LOST" not in ran.out, ran.out + ran.err
        return weights(ran.out, 2)

    assert trained("5:0:update") == trained()


# spec: L6 a death after the end of training: the job ends with it, and trains nothing again
def test_death_after_training():
    program = str(pathlib.Path(__file__).with_name("elastic_program.py"))
    ran = Launcher(program, "3", "after", ranks=2)
    assert ran.end() == 128 + signal.SIGKILL, ran.told()
    assert "training had ended on all ranks and is not repeated" in ran.err, ran.told()
    assert ran.out.count("from step") == 2, ran.told()


# spec: L6 a node that joins after training has ended disturbs nobody: the result is saved and all
# end well
def test_a_node_that_joins_after_training(tmp_path):
    program = str(pathlib.Path(__file__).with_name("elastic_program.py"))
    for rank in range(2):
        os.mkfifo(tmp_path / str(rank))
    with etcd_server() as endpoint:
        options = rendezvous("etcd", endpoint.removeprefix("http://"), "late", "1:2")
        options[-1] = "last_call_timeout=1,keep_alive_interval=5,keep_alive_max_attempt=60"
        words = (program, "3", f"saves:{tmp_path}")
        first = Launcher(*words, ranks=2, options=options)
        first.read_until("training has ended", 2)
        known = keys_in(endpoint)
        late = Launcher(*words, ranks=2, options=options)
        limit = time.monotonic() + LIMIT_S
        while keys_in(endpoint) <= known and time.monotonic() < limit:
            assert first.process.poll() is None and late.process.poll() is None, late.told()
            time.sleep(0.01)
        for rank in range(2):
            (tmp_path / str(rank)).write_text("")
        assert (first.end(), late.end()) == (0, 0), first.told() + late.told()
    assert first.out.count("from step") == 2 and "step" not in late.out, first.out + late.out
    assert all(torch.load(tmp_path / f"{rank}.pt") for rank in range(2))


def news_of_epoch(number, world_size):
    """A launcher to its worker, which is rank 0; the store is the one of the environment."""
    ranks = (0, world_size, 0, 1, 0, 1, 0, world_size)
    texts = [struct.pack("I", len(text)) + text for text in (b"", b"127.0.0.1", b"a test's reason")]
    head = struct.pack("=Bqi8i", 0, number, 0, *ranks)
    return head + texts[0] + texts[1] + struct.pack("=Hqq", 0, 0, 0) + texts[2]


# spec: L6 a worker that waits for the other ranks of an epoch goes on with the next one as soon as
# it is announced, long before its group's timeout; and tells the launcher of the end of training
def test_the_meeting_of_an_epoch_that_is_over():
    port = reserve_port()
    ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with subprocess.Popen(
        [TRAINER, "2"],
        env=kept
        | place
        | {"MUSTER_LAUNCHER_NEWS": str(workers.fileno()), "MUSTER_EPOCH": "1"}
        | {"MUSTER_SECRET": "a secret for the tests", "GROUP_WORLD_SIZE": "1"},
        pass_fds=[workers.fileno()],
        stdout=subprocess.PIPE,
    ) as worker:
        workers.close()
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert worker.poll() is None
                time.sleep(0.01)
        ours.send(news_of_epoch(2, 1))
        try:
            out, _ = worker.communicate(timeout=LIMIT_S)
        finally:
            worker.kill()
    assert worker.returncode == 0 and b"epoch 2 from step 0 as 0 of 1" in out, out
    words = [ours.recv(16)]
    while words[-1] and words[-1] != b"\0":  # the end of training, after the state and commits
        assert words[-1][:1] in (b"\2", b"\6"), words
        words.append(ours.recv(16))
    assert words[-1] == b"\0", words


# spec: L6 any value: containers of other kinds than dict and list come back as what they were
def test_values_keep_their_types():
    state = elastic.State(
        counts=collections.Counter(a=2),
        seen=collections.defaultdict(int, b=1),
        order=collections.OrderedDict(x=torch.ones(2), y=[torch.zeros(1), (3, torch.ones(1))]),
    )
    state.commit()
    state.counts["a"] += 1
    state.seen["c"] += 1
    state.order["x"].fill_(5)
    state.restore()
    assert state.counts == collections.Counter(a=2) and state.counts["absent"] == 0
    assert state.seen == {"b": 1}
    state.seen["new"] += 1
    assert list(state.order) == ["x", "y"] and type(state.order) is collections.OrderedDict
    assert torch.equal(state.order["x"], torch.ones(2)) and state.order["y"][1][0] == 3


def script(folder, first_line, rest=""):
    """An executable ./worker in a new folder; the words that begin a command there."""
    folder.mkdir()
    path = folder / "worker"
    path.write_text(f"#!{first_line}\n{rest}\n")
    path.chmod(0o755)
    return ("env", "-C", str(folder))


# spec: J4 a node that joins a job that others run, and cannot execute the program, ends alone with
# its own exit code and reason; the job goes on
def test_a_node_without_the_program_leaves_alone(tmp_path):
    end, port = tmp_path / "end", reserve_port()
    well = script(tmp_path / "a", "/bin/sh", f'exec {sys.executable} {PAUSED_PROGRAM} "$@"')
    without = script(tmp_path / "b", tmp_path / "no-interpreter")
    options = rendezvous("c10d", f"127.0.0.1:{port}", "job")
    options[-1] = options[-1].replace("last_call_timeout=3600", "last_call_timeout=0")
    first = Launcher("./worker", str(end), ranks=1, options=options, inside=well)
    first.read_until("step 50 of epoch 1")
    second = Launcher("./worker", str(end), ranks=1, options=options, inside=without)
    assert second.end() == 127, second.told()
    assert "could not be started" in second.err, second.told()
    assert "the job goes on without this node" in second.err, second.told()
    first.read_until("of epoch 3 at")
    end.touch()
    assert first.end() == 0, first.told() + second.told()
    assert "LOST" not in first.out, first.told()
