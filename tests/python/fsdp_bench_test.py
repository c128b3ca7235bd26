# SPDX-License-Identifier: BSD-3-Clause
"""`muster-lab fsdp`: what ranks hold is what the plan says, and losses are those of stock torch's
fully_shard on Gloo. `muster-lab checkpoint` beside torch's DCP.
"""

import os
import pathlib
import re
import subprocess
import sys

import muster

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


def run(program, *arguments):
    package = pathlib.Path(muster.__file__).parents[1]
    environment = dict(os.environ, PYTHONPATH=str(package), OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, BENCH / program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def bench(*arguments):
    return run("fsdp_steps.py", "--width", "48", "--layers", "3", "--steps", "3", *arguments)


# spec: M3 T5 memory per rank within 10 % of the plan, for every option, with 2 and 4 ranks
def test_bytes_are_those_of_the_plan():
    done = bench()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\S+), (\d) ranks", done.stdout, re.MULTILINE)
    assert len(rows) == 11 and ("hybrid", "4") in rows and ("part", "4") in rows
    assert len(re.findall(r"^  rank \d", done.stdout, re.MULTILINE)) == 4 * 2 + 7 * 4


# spec: M3 T5 losses beside those of stock fully_shard
def test_losses_are_those_of_stock():
    done = bench("--stock", "--ranks", "4", "--options", "hybrid,part")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("losses: muster", done.stdout)) == 2


# spec: T5 prefetch in a timeline: the next unit's gather begins before this one's part of backward
# ends
def test_a_timeline_shows_gathers_beside_computation():
    done = bench("--ranks", "2", "--options", "full", "--timeline")
    assert done.returncode == 0, done.stdout + done.stderr
    events = re.findall(r"ms  (\S+ \d+) +(\w+)", done.stdout)
    for unit in (2, 1):
        begins = events.index((f"Block {unit - 1}", "gather_started"))
        assert begins < events.index((f"Block {unit}", "backward_ended"))
    assert bench("--options", "most").returncode == 2


# spec: S1 S5 `muster-lab checkpoint` saves, loads and saves asynchronously beside torch's DCP
def test_checkpoints_beside_stock(tmp_path):
    done = run(
        "checkpoint_speed.py",
        *("--ranks", "2", "--mib", "4", "--rounds", "1", "--stock", "--folder", tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("the disk itself", "muster", "torch DCP"):
        assert re.search(rf"^  {row} +[1-9]\d* +[1-9]\d*$", done.stdout, re.MULTILINE), done.stdout
    assert "times a copy of its bytes" in done.stdout and not list(tmp_path.iterdir())
