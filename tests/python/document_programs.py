# SPDX-License-Identifier: BSD-3-Clause
"""Runs the documents' programs (examples/documents)."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from ranks import LIMIT_S, reserve_port

import muster as dist

PROGRAMS = pathlib.Path(__file__).parents[2] / "examples/documents"
MUSTER = pathlib.Path(dist.__file__).parents[2] / "bin/muster"
DEVICES = pathlib.Path(dist.__file__).parents[2] / "tests/accelerator"
IN_CPP = MUSTER.parent / "documents"


def environment_of(devices=0):
    """For a program; `devices`: how many accelerators it finds."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
    }  # whole lines, then
    environment["MASTER_PORT"] = str(reserve_port())
    # `launch` looks for python there.
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    if devices:
        environment["PYTHONPATH"] = f"{os.environ['PYTHONPATH']}:{DEVICES}"
        environment["MUSTER_TEST_DEVICES"] = str(devices)
    return environment


def program_in_cpp():
    """The program that has all of them by their names."""
    if not IN_CPP.exists():
        pytest.skip("built without the examples (MUSTER_EXAMPLES=OFF)")
    return IN_CPP


def run_program(name, *arguments, line=(sys.executable,), devices=0, language="Python"):
    """The program as it has ended, started by this line; in C++ without its interpreter."""
    environment = environment_of(devices)
    words = [*line, PROGRAMS / f"{name}.py"]
    if language == "C++":
        words = [*(word for word in line if word != sys.executable), program_in_cpp(), name]
        if devices:
            environment["LD_PRELOAD"] = str(DEVICES / "libmuster_preloaded_device.so")
    return subprocess.run(
        [*map(str, words), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
    )


def lines_of(text):
    """Line by line, without the launcher's marks, numbers of processes, addresses and ports."""
    plain = re.sub(r"(?m)^(\[\d+\] )+", "", text)
    plain = re.sub(
        r"'MASTER_ADDR': '[^']*', 'MASTER_PORT': '\d+'",
        "'MASTER_ADDR': 'here', 'MASTER_PORT': '#'",
        plain,
    )
    return [line for line in plain.splitlines() if line]


def said_by(name, *arguments, **options):
    ended = run_program(name, *arguments, **options)
    assert ended.returncode == 0, ended.stderr
    return lines_of(ended.stdout)


LANGUAGES = ("Python", "C++")
LAUNCH = (MUSTER, "launch", "--nnode=1", "--node_rank=0")
RUN = (MUSTER, "run", "--standalone", "--nproc-per-node", "2", sys.executable)
