# SPDX-License-Identifier: BSD-3-Clause
"""Programs of Python under `python -m muster.launch` and `python -m muster.run`: their arguments,
their environment, and what becomes of them where a rank fails.
"""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from ranks import LIMIT_S, reserve_port

PROGRAM = """
import json, os, sys
print("SAYS", json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")}]))
"""
FAILS_ONCE = """
import os, pathlib, sys
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pathlib.Path(sys.argv[1], f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {again}").touch()
sys.exit(3 if os.environ["RANK"] == "1" and again == 0 else 0)
"""


@pytest.fixture
def write(tmp_path):
    def written(text):
        file = tmp_path / "program.py"
        file.write_text(text)
        return file

    return written


def run(*words, code=0):
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == code, ended.stderr
    return ended


def said(*words):
    """(arguments, environment) of each rank, in their order."""
    texts = [line.partition("SAYS ")[2] for line in run(*words).stdout.splitlines()]
    found = [json.loads(text) for text in texts if text]
    return sorted(found, key=lambda each: int(each[1]["RANK"]))


# spec: J1 J7 the program gets --local-rank, unless --use-env; J6 underscores, --nnode and
# --use-env=True are taken
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options, argument",
    [
        (["--nproc-per-node=2"], "--local-rank={rank}"),
        (["--nproc_per_node=2", "--nnode=1", "--node_rank=0"], "--local-rank={rank}"),
        (["--nproc_per_node=2", "--use_env"], None),
        (["--nproc-per-node=2", "--use-env=True"], None),
    ],
)
def test_local_rank(write, options, argument):
    ranks = said("muster.launch", *options, write(PROGRAM), "-x")
    for rank, (arguments, environment) in enumerate(ranks):
        assert arguments == [*([argument.format(rank=rank)] if argument else []), "-x"]
        assert environment["LOCAL_RANK"] == environment["RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == "2" and environment["MASTER_ADDR"]
        assert int(environment["MASTER_PORT"]) > 0
    assert len(ranks) == 2


# spec: J8 LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID and MASTER_ADDR; --standalone needs no --rdzv
def test_environment(write):
    for underscore in (False, True):
        name = "--rdzv_id" if underscore else "--rdzv-id"
        (_, environment), _, _ = said(
            "muster.run", "--standalone", "--nproc-per-node", 3, f"{name}=mine", write(PROGRAM)
        )
        assert environment["LOCAL_WORLD_SIZE"] == environment["WORLD_SIZE"] == "3"
        assert environment["TORCHELASTIC_RUN_ID"] == "mine"
        assert environment["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert environment["MASTER_ADDR"] in (socket.getfqdn(), socket.gethostname())


# spec: J4 a worker that fails: all start again, up to --max-restarts
def test_restart(write, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    line = ["muster.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run(*line, write(FAILS_ONCE), seen)
    assert {f"{rank} of 2, 1" for rank in range(2)} <= {
        each.name for each in pathlib.Path(seen).iterdir()
    }
    assert "1 of 2, 0" in os.listdir(seen)
    ended = run(*line[:3], write(FAILS_ONCE), seen, code=3)
    assert "rank 1" in ended.stderr and "3" in ended.stderr


RAISES = """
import os
from muster.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("what went wrong")

main()
"""


# spec: L13 the exception of a program under @record is in the report, and --events writes the
# failure as a JSON line, with rank, node and exit code
def test_recorded_exception(write, tmp_path):
    log = tmp_path / "events.jsonl"
    line = ["muster.run", "--standalone", "--nproc-per-node=2", "--events", log]
    ended = run(*line, write(RAISES), code=1)
    assert "rank 1 (local rank 1" in ended.stderr
    assert "its error file says: ValueError: what went wrong" in ended.stderr
    assert re.search(r"\| .*line \d+, in main", ended.stderr), ended.stderr
    events = [json.loads(each) for each in log.read_text().splitlines()]
    assert [each["event"] for each in events] == ["workers_started", "worker_failed", "ended"]
    failed = events[1]
    assert (failed["node"], failed["rank"], failed["exit_code"], failed["signal"]) == (0, 1, 1, "")
    assert "what went wrong" in failed["error"]


# spec: L2 --log-line-prefix-template of torchrun
def test_prefixes_of_lines(write):
    ended = run(
        *["muster.run", "--standalone", "--nproc-per-node=2", "--role", "trainer"],
        *["--log-line-prefix-template", "<${role_name}/${local_rank}/${rank}> "],
        write('print("hello", flush=True)'),
    )
    assert sorted(ended.stdout.splitlines()) == [
        f"<trainer/{rank}/{rank}> hello" for rank in (0, 1)
    ]


FAILS_IN_TURN = """
import os, sys
import torch
import muster as dist

again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group()
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 4
print("SAYS", os.environ["RANK"], os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], again,
      flush=True)
dist.barrier()
if again == 0 and dist.get_rank() == 2:
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def node():
    """Starts a node of a job that meets at an endpoint; what still runs at the end is killed."""
    endpoint, nodes = f"127.0.0.1:{reserve_port()}", []

    def started(*words):
        line = [sys.executable, "-m", "muster.run", "--rdzv-backend=c10d", "--rdzv-id=job"]
        nodes.append(
            subprocess.Popen(
                [*line, f"--rdzv-endpoint={endpoint}", *map(str, words)],
                env=os.environ
                | {"MUSTER_SECRET": "a secret for the tests", "MUSTER_LOG_LEVEL": "info"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return nodes[-1]

    yield started
    for each in nodes:
        each.kill()
        each.communicate()


# spec: L2 over two nodes that meet at an endpoint: a worker fails, and the workers of both nodes
# start again with the same places
def test_restart_on_two_nodes(write, node):
    words = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", write(FAILS_IN_TURN)]
    places = []
    for each in [node(*words) for _ in range(2)]:
        output, errors = each.communicate(timeout=LIMIT_S)
        assert each.returncode == 0, errors
        places += re.findall(r"SAYS (\d) (\d) (\d) (\d)", output)
    assert sorted(places) == sorted(
        (str(rank), str(rank // 2), str(rank % 2), str(again))
        for rank in range(4)
        for again in range(2)
    )


WAITS = """
import time
print("up", flush=True)
time.sleep(3600)
"""


# spec: L3 a node of a fixed set dies: the job ends at once, by name
def test_death_of_a_node(write, node):
    words = ["--nnodes=2", "--nproc-per-node=1", write(WAITS)]
    first = node(*words)
    while "waiting for 1 other node" not in first.stderr.readline():
        assert first.poll() is None
    second = node(*words)
    for each in (first, second):
        assert "up" in each.stdout.readline()
    second.kill()
    _, errors = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 1
    assert "FAILED on another node" in errors and "is gone" in errors, errors
    assert "; 1 node of at least 2" in errors, errors


OF_AN_OLD_EPOCH = """
import os
import muster as dist

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
now = os.environ["MUSTER_EPOCH"]
os.environ["MUSTER_EPOCH"] = str(int(now) - 1)
try:
    dist.init_process_group()
except dist.DistError as error:
    print("SAYS", int(now) - 1, now, error, flush=True)
"""


# spec: L5 a rank of an older epoch of the job is refused by name
def test_an_older_epoch_is_refused(write, node):
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1"]
    only = node(*words, "--rdzv-conf=last_call_timeout=0", write(OF_AN_OLD_EPOCH))
    output, errors = only.communicate(timeout=LIMIT_S)
    assert only.returncode == 0, errors
    before, now, words = re.search(r"SAYS (\d+) (\d+) (.*)", output).groups()
    assert f"epoch {before}" in words and f"epoch {now}" in words, words


SEGFAULTS = """
import ctypes, resource, signal
import torch
import muster as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others
dist.init_process_group()
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)
try:
    while True:
        dist.all_reduce(torch.ones(4))
except dist.DistError as error:
    print("HEARS", error.ranks, error, flush=True)
"""


# spec: H7 the signal that has ended a rank is named by the others, under a launcher too
def test_a_segfault_is_named_by_the_others(write):
    ended = run("muster.run", "--nproc-per-node=3", write(SEGFAULTS), code=128 + 11)
    heard = re.findall(r"HEARS \[1\] .*has died \(SIGSEGV\)", ended.stdout)
    assert len(heard) == 2, ended.stdout + ended.stderr
