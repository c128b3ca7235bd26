# SPDX-License-Identifier: BSD-3-Clause
"""Files that the tests themselves leave behind."""

import os
import subprocess
import sys
import time

import pytest
import scratch


class Run:
    """A run of its own, whose temporary files stand in `folder`: it makes some, says so, and does
    `then`; `input()` lasts until the end.
    """

    def __init__(self, folder, then):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import scratch\nprint(scratch.meeting_file(), flush=True)\n{then}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.meeting = os.path.dirname(self.process.stdout.readline().strip())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(60)


def aged(folder):
    hour_ago = time.time() - 3600
    for each in os.listdir(folder):
        os.utime(os.path.join(folder, each), (hour_ago, hour_ago))


def test_a_run_takes_its_files_with_it(tmp_path):
    with Run(tmp_path, "") as run:
        assert run.meeting.startswith(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_files_of_a_killed_run_go_at_the_next_start(tmp_path):
    with Run(tmp_path, "input()") as run:
        run.process.kill()
    scratch.sweep(tmp_path)
    assert os.path.isdir(run.meeting), "its maker may not have locked it yet"
    aged(tmp_path)
    scratch.sweep(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "then",
    ["input()", "import os\nif os.fork(): os.kill(os.getpid(), 9)\ninput()"],
    ids=["a run", "a rank of a killed run"],
)
def test_files_of_what_still_runs_stay(tmp_path, then):
    with Run(tmp_path, then) as run:
        if "fork" in then:
            run.process.wait(60)
        aged(tmp_path)
        scratch.sweep(tmp_path)
        assert os.path.isdir(run.meeting)
