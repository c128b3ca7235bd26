# SPDX-License-Identifier: BSD-3-Clause
"""bench/replica_steps.py: its table, and tiny runs where there are root and network namespaces.
Figures are not judged.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from scratch import LIMIT_S

import muster

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import replica_steps  # noqa: E402

PACKAGE = pathlib.Path(muster.__file__).parents[1]
TINY = ["--replicas", "2", "--sync-every", "6", "--batch", "1", "--context", "8"]
TINY += ["--width", "16", "--layers", "1"]


def bench(tmp_path, *words):
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("hosts need root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no network namespaces")
    rows = tmp_path / "rows.jsonl"
    limited = ["--limit", str(LIMIT_S / 2)]  # of a row
    done = subprocess.run(
        [sys.executable, ROOT / "bench/replica_steps.py", *TINY, *limited, "--json", rows, *words],
        env=dict(os.environ, PYTHONPATH=str(PACKAGE)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, [json.loads(line) for line in rows.read_text().splitlines()]


def test_a_line_of_the_table():
    runs = [
        {"loss": 2.0, "bytes_per_token": 10.0, "tokens_per_s": 100.0},
        {"loss": 3.0, "bytes_per_token": 12.0, "tokens_per_s": 300.0},
    ]
    words = replica_steps.loss_line("int8", runs, 2.0).split()
    assert words == ["int8", "2.5000", "2.0000", "3.0000", "+25.00", "%", "11.0", "200"]
    assert replica_steps.loss_line("int8", runs, None).split()[4:] == ["11.0", "200"]


def test_options_are_read():
    options = replica_steps.read_options(["--links", "--rate", "0.01", "--rates", "10mbit,1gbit"])
    assert options.rates == [1e7, 1e9] and options.round_trips == [0, 20, 100]
    assert options.rows == list(replica_steps.SPEEDS) and options.rest == ["--rate", "0.01"]
    assert replica_steps.read_options([]).rates == [1e9]
    wrong = ["--rows none", "--replicas 1", "--round-trips 20", "--rates 10mbit,1gbit"]
    for words in map(str.split, wrong):
        with pytest.raises(SystemExit):
            replica_steps.read_options(words)


# spec: X2 the same tokens by DDP, by DiLoCo in each compression, streaming, and by stock torch
def test_losses(tmp_path):
    rows = ",".join(replica_steps.ROWS)
    said, runs = bench(tmp_path, "--tokens", "200", "--seeds", "1,2", "--rows", rows)
    assert [run["row"] for run in runs] == [row for row in replica_steps.ROWS for _ in range(2)]
    assert len({run["tokens"] for run in runs}) == 1 and runs[0]["tokens"] == 192
    found = {(run["row"], run["seed"]): run["loss"] for run in runs}
    for seed in (1, 2):
        assert found["ddp", seed] == pytest.approx(found["gloo ddp", seed], abs=1e-3)
        assert found["diloco", seed] == pytest.approx(found["gloo diloco", seed], abs=1e-3)
        assert found["ddp", seed] != found["diloco", seed]
    sent = {run["row"]: run["bytes_per_token"] for run in runs}
    assert 0 < sent["int4"] < sent["int8"] < sent["diloco"] < sent["ddp"]
    assert len(said.splitlines()) == 3 + len(replica_steps.ROWS)


def test_links(tmp_path):
    words = ("--links", "--rates", "1gbit", "--round-trips", "0,20", "--rows", "ddp,int8")
    said, runs = bench(tmp_path, *words)
    assert [(run["row"], run["round_trip_ms"]) for run in runs] == [
        ("ddp", 0),
        ("int8", 0),
        ("ddp", 20),
        ("int8", 20),
    ]
    assert all(run["tokens_per_s"] > 0 for run in runs)
    assert len(said.splitlines()) == 5
