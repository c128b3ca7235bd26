# SPDX-License-Identifier: BSD-3-Clause
"""bench/restarts.py: a row of each event that is asked for, and no process is left. Figures are not
judged.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import muster

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "restarts.py"
PACKAGE = pathlib.Path(muster.__file__).parents[1]  # in the folder of the build


def restarts(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, "--build", PACKAGE.parent, "--rounds", "1", *arguments],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )


def processes_of_jobs():
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"MUSTER_BENCH_HOST=" in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


# spec: L2 all workers of three nodes restart after the death of one, and step again
@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_a_death_of_a_worker_has_a_row():
    before = processes_of_jobs()
    done = restarts("--events", "worker", "--libraries", "muster")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^worker +muster +\d+\.\d+ +\d+\.\d+ +\d+\.\d+$", done.stdout, re.MULTILINE)
    assert not set(processes_of_jobs()) - set(before)


# spec: L2 an event or a library that is not known is refused
def test_what_is_not_known_is_refused():
    for words in (("--events", "flood"), ("--libraries", "mpich")):
        assert restarts(*words).returncode == 2
