# SPDX-License-Identifier: BSD-3-Clause
"""Python's interpreter lock and the locks of muster: neither is waited for under the other. The
programs run on the build of the extension that checks it (python/checks/lock_order.cc) and aborts
where it does not hold.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from scratch import LIMIT_S

import muster

BUILD = pathlib.Path(muster.__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("lock_order_program.py")
PROGRAMS = [
    "group_hooks",
    "objects",
    "model_hooks",
    "unit_hooks",
    "python_store",
    "python_backend",
    "remote_calls",
]


def launch(*words, options=()):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    return subprocess.run(
        [str(BUILD / "bin/muster"), "run", "--standalone", "--nproc-per-node", "2", *options]
        + [sys.executable, str(PROGRAM), *words],
        env=kept | {"PYTHONPATH": str(BUILD / "python-checked"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


# spec: U2 hooks and callbacks of programs: no lock of ours is held while it runs, and none is
# waited for under Python's
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, tmp_path):
    ran = launch(name, str(tmp_path))
    assert ran.returncode == 0 and ran.stdout.count("went well") == 2, ran.stdout + ran.stderr


# spec: L6 elastic.epoch() answers while an abort hook runs because a rank has died
def test_epoch_is_known_during_an_abort_hook():
    ran = launch("epochs", options=["--elastic", "keep", "--max-restarts", "5"])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("outcome finished 1") == 2, ran.stdout + ran.stderr


# The check itself: PyDLL keeps the interpreter lock during a call, CDLL does not.
@pytest.mark.parametrize(
    ("library", "said"), [("PyDLL", "holds Python's GIL"), ("CDLL", "holds a lock of muster")]
)
def test_the_check_sees_what_it_is_for(library, said):
    call = f"ctypes.{library}(muster._C.__file__).muster_break_lock_order()"
    ran = subprocess.run(
        [sys.executable, "-c", f"import ctypes, muster; {call}"],
        env=os.environ | {"PYTHONPATH": str(BUILD / "python-checked")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert said in ran.stderr and ran.returncode != 0, ran.stderr
