# SPDX-License-Identifier: BSD-3-Clause
"""Links over a long way, and bench/far_links.py that measures them, where there are root and
network namespaces. Figures are not judged.
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
import far_links  # noqa: E402

PACKAGE = pathlib.Path(muster.__file__).parents[1]
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100D50A:8AE1 0200D50A:C7F4 01 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100D50A:8AE1 0200D50A:C7F6 06 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 0100D50A:8AE1 0300D50A:C7F8 01 00000000:00000000 00:00000000 00000000     0        0 3 1
   3: 0100D50A:8AE1 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is of a little-endian machine")
def test_connections_are_counted():
    assert far_links.connections_to("10.213.0.2", TABLE) == 1
    assert far_links.connections_to("10.213.0.4", TABLE) == 0


def test_options_are_read():
    options = far_links.read_options(["--rates", "100mbit,1gbit", "--rows", "one"])
    assert options.rates == [1e8, 1e9] and options.rows == ["one"]
    assert far_links.read_options([]).round_trips == [200]
    for words in (["--rows", "two"], ["--warm-up", "0"], ["--round-trips", "-1"]):
        with pytest.raises(SystemExit):
            far_links.read_options(words)


# spec: X4.connections more connections where the round trip is long, and one if told so
def test_connections_go_by_the_round_trip(tmp_path):
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("hosts need root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no network namespaces")
    rows = tmp_path / "rows.jsonl"
    small = ["--size", str(1 << 20), "--messages", "2", "--warm-up", "1", "--in-flight", "2"]
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench/far_links.py", *small, "--limit", str(LIMIT_S / 4)),
            *("--round-trips", "0,50", "--json", rows),
        ],
        env=dict(os.environ, PYTHONPATH=str(PACKAGE)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["round_trip_ms"], row["row"]) for row in found] == [
        (round_trip, row) for round_trip in (0, 50) for row in ("one", "default")
    ]
    near_one, _, far_one, far = (row["connections"] for row in found)
    assert near_one == far_one == 1
    # The relay is a process that others keep from its core: what is measured may be longer.
    assert 3 <= far <= 16
    assert all(row["rate"] > 0 for row in found)
    assert len(done.stdout.splitlines()) == 1 + len(found)
