# SPDX-License-Identifier: BSD-3-Clause
"""Shared by runs of ctest over the built tree: the tests that failed, and the server of pytest."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
_RED = BUILD / "Testing/Temporary/LastTestsFailed.log"


def forget_red_tests():
    """Before a run: ctest leaves an older run's list where no test fails."""
    _RED.unlink(missing_ok=True)


def red_tests():
    """The names that ctest wrote down as failed in its last run."""
    lines = _RED.read_text().splitlines() if _RED.exists() else []
    return [line.partition(":")[2] for line in lines if line]


@contextlib.contextmanager
def pytest_server():
    """The variable that names tools/forked_pytest's server, if the tree has a Python for it."""
    python = ROOT / ".venv/bin/python"
    if not python.exists():
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [python, ROOT / "tools/forked_pytest", "serve", f"{folder}/socket"]
        # As CMake starts those tests: torch reads it when it is imported.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(words, stdin=subprocess.PIPE, env=environment) as server:
            while not os.path.exists(words[-1]) and server.poll() is None:
                time.sleep(0.01)
            if server.poll() is None:
                yield {"MUSTER_PYTEST_SERVER": words[-1]}
            else:
                print("each file of pytest's imports torch itself", file=sys.stderr)
                yield {}
