"""Programs of Python under `python -m muster.launch` and `python -m muster.run`: their arguments,
their environment, and what becomes of them where a rank fails.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

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
        [sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=120
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
