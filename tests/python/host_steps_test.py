# SPDX-License-Identifier: BSD-3-Clause
"""bench/host_steps.py: the arithmetic of what a step must send and of its shortest time; one tiny
run where there are root and iproute2.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import muster

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import host_steps  # noqa: E402
from host_steps import Piece  # noqa: E402

MODEL = {
    "forward": 1.0,
    "gradients": [
        {"name": "head", "shape": [10], "seconds": 0.5},
        {"name": "blocks.0.first", "shape": [8, 4, 3, 3], "seconds": 1.5},
    ],
    "units": [{"elements": 288, "forward": 0.75, "backward": 1.5}],
    "outer": 10,
}


def test_a_host_sends_its_part_of_every_gradient():
    def sent(row, hosts):
        return sum(piece.gives for piece in host_steps.ddp_pieces(row, MODEL, hosts))

    assert sent("ddp", 2) == 298 * 4
    assert sent("gloo ddp", 4) == 298 * 4 * 1.5
    assert sent("fp16", 2) == sent("gloo fp16", 2) == 298 * 2
    assert sent("powersgd", 2) == (10 + 2 * (8 + 36)) * 4


def test_power_sgd_leaves_what_would_not_shrink():
    assert host_steps.factors([512, 512, 3, 3]) == 2 * (512 + 4608)
    assert host_steps.factors([4, 4]) == 16
    assert host_steps.factors([100]) == 100


def test_shards_travel_three_times_and_the_outer_unit_twice():
    pieces = host_steps.fsdp_pieces(MODEL, 2)
    assert sum(piece.needs + piece.gives for piece in pieces) == (3 * 288 + 2 * 10) * 4 / 2
    assert sum(piece.seconds + piece.anywhere for piece in pieces) == pytest.approx(3)
    assert host_steps.wire_s(pieces, 8) == (3 * 288 + 2 * 10) * 2


def test_the_shortest_step():
    rate = 8  # a byte a second
    # Nothing is sent in forward; the last gradient is sent after backward.
    assert host_steps.least_s([Piece(4), Piece(2, 0, 3), Piece(2, 0, 3)], rate) == 12
    assert host_steps.least_s([Piece(4), Piece(2, 0, 1), Piece(2, 0, 1)], rate) == 9
    # Gathered before it computes; what follows is gathered meanwhile.
    assert host_steps.least_s([Piece(5, 1), Piece(5, 1, 2)], rate) == 13
    assert host_steps.least_s([Piece(1, 9), Piece(1, 9)], rate) == 19
    # Nobody knows when the rest is computed; the wire may be busy meanwhile.
    assert host_steps.least_s([Piece(1, 1), Piece(1, 1), Piece(0, 0, 2, 9)], rate) == 14
    assert host_steps.least_s([Piece(1, 9), Piece(1, 9, 0, 3)], rate) == 19


def test_options_are_read():
    options = host_steps.read_options(["--rate", "100mbit", "--batches", "4", "--rows", "ddp,fsdp"])
    assert (options.rate, options.batches, options.rows) == (1e8, [4], ["ddp", "fsdp"])
    with pytest.raises(SystemExit):
        host_steps.read_options(["--rows", "none"])


def test_a_row_of_each_kind(tmp_path):
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("hosts need root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no network namespaces")
    rows = tmp_path / "rows.jsonl"
    package = pathlib.Path(muster.__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench/host_steps.py", "--rate", "10gbit", "--batches", "1"),
            *("--rounds", "1", "--warm", "3", "--json", rows),
        ],
        env=dict(os.environ, PYTHONPATH=str(package)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["row"] for row in found] == list(host_steps.ROWS)
    for row in found:
        assert row["step_ms"] > 0 and row["least_ms"] >= row["wire_ms"] > 0
