# SPDX-License-Identifier: BSD-3-Clause
"""`torchrun --rdzv-backend=muster`: stock torchrun's nodes, several on this machine, meet by
muster's membership.
"""

import concurrent.futures
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
import tomllib
from etcd_server import etcd_server
from kubernetes_api import kubernetes_api
from ranks import sampled
from scratch import LIMIT_S, reserve_port
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from muster.torch.rendezvous import handler

ROOT = pathlib.Path(__file__).parents[2]
EXIT_BARRIER = "torchelastic/agent/terminal_state/num_members"

SUM = """
import datetime, importlib, os, sys, torch
dist = importlib.import_module("muster" if sys.argv[1] == "native" else "torch.distributed")
dist.init_process_group(sys.argv[1], timeout=datetime.timedelta(seconds=60))
rank, again = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
node, place = os.environ["NODE"], f"node {os.environ['GROUP_RANK']} of " + os.environ[
    "GROUP_WORLD_SIZE"]
os.write(1, f"{node}: {place}, sum {int(x[0])}, restart {again}, "
            f"job {os.environ['TORCHELASTIC_RUN_ID']}\\n".encode())
if again == "0" and rank == int(sys.argv[2]):
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""

# Rank 0's node says for how many rounds the job has gone; after the last one all end well.
ROUNDS = """
import datetime, os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, rounds = dist.get_rank(), torch.zeros(1)
if rank == 0:
    with open(sys.argv[1], "a+") as file:
        file.write("x")
        rounds[0] = file.tell()
dist.broadcast(rounds, 0)
os.write(1, f"rank {rank} of {dist.get_world_size()}, round {int(rounds[0])}, "
            f"process {os.getpid()}\\n".encode())
if rounds[0] < int(sys.argv[2]):
    signal.pause()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder for PYTHONPATH with the entry points that the wheel has."""
    folder = tmp_path_factory.mktemp("site")
    made = folder / "muster_dist-0.dist-info"
    made.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: muster-dist\nVersion: 0\n")
    with open(made / "entry_points.txt", "w") as file:
        for group, names in project["entry-points"].items():
            file.write(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()))
    return folder


class Torchrun:
    """A node of a job: the agent and its worker."""

    def __init__(self, site, port, *words, nodes, name="", configuration="", restarts=3):
        self._err = tempfile.TemporaryFile()
        conf = "close_timeout=10,join_timeout=60" + ("," + configuration if configuration else "")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"]
            + [f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job", f"--nnodes={nodes}"]
            + [f"--rdzv-conf={conf}", "--nproc-per-node=1", f"--max-restarts={restarts}"]
            + ["--monitor-interval=0.05", *map(str, words)],
            env=os.environ
            | {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}", "NODE": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
        )

    def read(self, text):
        """The first line of its workers, not read yet, with this text."""
        for line in self.process.stdout:
            if text in line:
                return line.strip()
        pytest.fail(f"never said: {text}\n{self.err}")

    @property
    def err(self):
        self._err.seek(0)
        return self._err.read().decode()

    def end(self, code=0):
        """Its workers' lines that were not read yet."""
        out, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == code, out + self.err
        return out.splitlines()

    def kill(self, worker):
        """The whole node."""
        self.process.kill()
        os.kill(worker, signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def start(site):
    """Starts nodes; none outlives the test."""
    started = []

    def node(*words, **options):
        started.append(Torchrun(site, *words, **options))
        return started[-1]

    yield node
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def program(folder, text):
    file = folder / "program.py"
    file.write_text(text)
    return file


# spec: L12 stock torchrun on two nodes finds muster by its entry point; programs of torch's own
# Gloo, of backend muster and of muster alone. A killed worker restarts those of both nodes, which
# keep their ranks
@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend, killed", sampled(3, ["muster", "gloo", "native"], [0, 1]))
def test_restart(start, tmp_path, backend, killed):
    port, file = reserve_port(), program(tmp_path, SUM)
    nodes = [start(port, file, backend, killed, nodes=2, name=name) for name in "ab"]
    said = [line for node in nodes for line in node.end()]
    restarts = 0
    for name in "ab":
        first, second = [line for line in said if line.startswith(name)]
        assert first.endswith("of 2, sum 3, restart 0, job job"), said
        # torchrun counts where workers failed before the agent was told to end them.
        restarts += "restart 1" in second
        assert second.replace("restart 1", "restart 0") == first, said
    assert restarts > 0


def process_of(line):
    return int(line.split()[-1])


# spec: L12 --nnodes MIN:MAX: a node joins later, is killed, and another takes its rank
def test_nodes_come_and_go(start, tmp_path):
    port, file = reserve_port(), program(tmp_path, ROUNDS)
    words = [port, file, tmp_path / "rounds", 4]
    options = {"nodes": "1:2", "configuration": "last_call_timeout=0"}
    first = start(*words, **options)
    first.read("rank 0 of 1, round 1")
    second = start(*words, **options)
    first.read("rank 0 of 2, round 2")
    second.kill(process_of(second.read("rank 1 of 2, round 2")))
    first.read("rank 0 of 1, round 3")
    third = start(*words, **options)
    assert "rank 0 of 2, round 4" in first.end()[0]
    assert "rank 1 of 2, round 4" in third.end()[0]


# spec: L12 membership agent: the loss of the node that serves it is no end where another can serve
def test_the_serving_node_is_killed(start, tmp_path):
    port, file = reserve_port(), program(tmp_path, ROUNDS)
    words = [port, file, tmp_path / "rounds", 3]
    options = {"nodes": "1:2", "configuration": "last_call_timeout=0"}
    first = start(*words, **options)
    first.read("rank 0 of 1, round 1")
    second = start(*words, **options)
    second.read("rank 1 of 2, round 2")
    first.kill(process_of(first.read("rank 0 of 2, round 2")))
    assert "rank 0 of 1, round 3" in second.end()[0]


# The handlers below are used without agents, one on each thread.


def node_of(port, least, most, **configuration):
    endpoint = configuration.pop("endpoint", f"localhost:{port}")
    configuration = {"last_call_timeout": 0, "close_timeout": 10} | configuration
    return handler()(RendezvousParameters("muster", endpoint, "job", least, most, **configuration))


@pytest.fixture
def together():
    """Calls of several threads at once; their results."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def called(*calls):
            begun = [pool.submit(call) for call in calls]
            return [each.result(LIMIT_S) for each in begun]

        called.begin = pool.submit
        yield called


def await_round(node):
    while node.num_nodes_waiting() == 0:
        node._wait(LIMIT_S)


def assert_meeting(infos):
    assert sorted(info.rank for info in infos) == list(range(len(infos)))
    assert {info.world_size for info in infos} == {len(infos)}
    places = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        for info in infos
    }
    assert len(places) == 1
    infos[0].store.set("said", "to all")
    assert [info.store.get("said") for info in infos] == [b"to all"] * len(infos)


# spec: L12.agent[agent] L12.etcd[etcd] L12.kubernetes[kubernetes] membership etcd: rounds, their
# stores and the end of the job
# spec: L12 membership agent: rounds, their stores and the end of the job
# spec: L12 membership kubernetes: rounds, their stores and the end of the job
@pytest.mark.parametrize("kind", ["agent", "etcd", "kubernetes"])
def test_rounds(together, monkeypatch, kind):
    def rounds(port, **configuration):
        a, b = (node_of(port, 2, 2, **configuration) for _ in range(2))
        assert a.get_backend() == "muster" and a.get_run_id() == "job" and not a.use_agent_store
        assert a.num_nodes_waiting() == 0 and not a.is_closed()
        before = together(a.next_rendezvous, b.next_rendezvous)
        assert_meeting(before)
        assert a.num_nodes_waiting() == 0
        again = together(a.next_rendezvous, b.next_rendezvous)
        assert_meeting(again)
        assert [info.rank for info in again] == [info.rank for info in before]
        assert not again[0].store.check(["what nobody sets"])
        a.set_closed()
        with pytest.raises(RendezvousClosedError, match="closed by"):
            b.next_rendezvous()
        assert a.is_closed() and b.is_closed() and b.num_nodes_waiting() == 0
        assert together(a.shutdown, b.shutdown) == [True, True]

    if kind == "agent":
        return rounds(reserve_port())
    if kind == "kubernetes":
        with kubernetes_api() as (endpoint, environment):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            rounds(0, endpoint=endpoint, membership="kubernetes", keep_alive_interval=1)
        return None
    with etcd_server() as endpoint:
        rounds(0, endpoint=endpoint, membership="etcd", keep_alive_interval=1)


# spec: L12 a round begins when all its nodes have come; others are told to come
def test_all_come(together):
    port = reserve_port()
    a, b = (node_of(port, 2, 2) for _ in range(2))
    together(a.next_rendezvous, b.next_rendezvous)
    begun = together.begin(a.next_rendezvous)
    await_round(b)
    assert not begun.done()
    assert_meeting([b.next_rendezvous(), begun.result(LIMIT_S)])
    together(a.shutdown, b.shutdown)


# spec: L12 a node whose workers have ended well is in no later round, and keeps none waiting
def test_finished(together):
    port = reserve_port()
    a, b = (node_of(port, 1, 2, last_call_timeout=30) for _ in range(2))
    infos = together(a.next_rendezvous, b.next_rendezvous)
    assert infos[0].store.add(EXIT_BARRIER, 1) == 1
    assert b.num_nodes_waiting() == 0
    info = b.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    together(a.shutdown, b.shutdown)


# spec: L12 a node for which there is no room waits, takes a lost one's place, and goes at the end
def test_spare(together):
    port = reserve_port()
    first = node_of(port, 1, 2)
    assert first.next_rendezvous().world_size == 1
    second = together.begin((lost := node_of(port, 1, 2)).next_rendezvous)
    await_round(first)
    assert first.next_rendezvous().world_size == second.result(LIMIT_S).world_size == 2
    spare = node_of(port, 1, 2)
    waiting = together.begin(spare.next_rendezvous)
    last = node_of(port, 1, 2)
    never = together.begin(last.next_rendezvous)
    second = None
    lost._forget()  # as its end does
    size = 1
    while size < 2:  # alone, where neither of the others had asked yet
        await_round(first)
        info = first.next_rendezvous()
        assert info.rank == 0
        size = info.world_size
    done = concurrent.futures.wait([waiting, never], LIMIT_S, "FIRST_COMPLETED").done
    assert [each.result().rank for each in done] == [1]
    left, rest = (last, never) if waiting in done else (spare, waiting)
    while left._newest is None:  # not come yet
        time.sleep(0.01)
    first.set_closed()
    with pytest.raises(RendezvousGracefulExitError):
        rest.result(LIMIT_S)
    together(spare.shutdown, last.shutdown, first.shutdown)


# spec: L12 errors in torch's classes say what is missing
def test_errors():
    alone = node_of(reserve_port(), 2, 2, join_timeout=3)
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes came within 3 s"):
        alone.next_rendezvous()
    assert alone.is_closed() and alone.shutdown()
    far = node_of(0, 2, 2, endpoint="192.0.2.1:29400")
    with pytest.raises(RendezvousConnectionError, match="MUSTER_SECRET"):
        far.next_rendezvous()
    for wrong, text in (
        ({"membership": "raft"}, "is not agent, etcd or kubernetes"),
        ({"join_timeout": "soon"}, "join_timeout=soon is no number of seconds"),
        ({"last_cal_timeout": 1}, "last_cal_timeout is not known"),
        ({"keep_alive_interval": 0}, "above 0"),
    ):
        with pytest.raises(ValueError, match=text):
            node_of(0, 1, 1, **wrong)


class Rung(Exception):
    pass


# spec: L12 signals, which end torchrun by exceptions, end the waits for a server and for nodes
@pytest.mark.parametrize("mute", [True, False])
def test_signals(mute):
    def ring(*_):
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1] if mute else reserve_port()
            node = node_of(port, 2, 2, endpoint=f"127.0.0.1:{port}")
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Rung):
                node.next_rendezvous()
            node._forget()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
