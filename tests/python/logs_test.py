# SPDX-License-Identifier: BSD-3-Clause
"""The lines of muster's C++ half as records of Python's `logging`."""

import logging
import os
import textwrap

import forked
import pytest
from ranks import LIMIT_S, meeting_file

PROGRAM = textwrap.dedent("""
    import logging, os, sys
    import torch
    import muster as dist
    import muster.logs

    class Kept(logging.Handler):
        def emit(self, record):
            kept.append(record)

    kept = []
    logger = logging.getLogger("muster" if sys.argv[2] == "default" else "mine")
    logger.addHandler(Kept())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if sys.argv[2] == "default":
        muster.logs.to_logging()
    else:
        muster.logs.to_logging(logger)
    dist.init_process_group(init_method="file://" + sys.argv[1], rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    muster.logs.to_stderr()
    for record in kept:
        print(record.name, record.levelname, record.rank, record.getMessage())
    assert all(abs(record.created - kept[0].created) < 3600 for record in kept)
    if os.fork() == 0:
        os._exit(0)
    os.wait()
""")


# spec: V6.python on request the lines are records of logger "muster", or of one that is given
@pytest.mark.parametrize("how, name", [("default", "muster"), ("own", "mine")])
def test_lines_are_records(how, name):
    started = forked.start(
        PROGRAM,
        meeting_file(),
        how,
        env=os.environ | {"MUSTER_LOG_LEVEL": "trace"},
        stdout=-1,
        stderr=-1,
        text=True,
    )
    said, complained = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 0, complained
    assert complained == "", "lines went to standard error too"
    lines = said.splitlines()
    assert lines, "no line came"
    assert all(line.startswith(f"{name} INFO ") for line in lines), said
    assert any(line.startswith(f"{name} INFO 0 ") and "group default" in line for line in lines)


# spec: V6.python a handler that raises loses its own record, and is told of once
def test_a_handler_that_raises():
    program = PROGRAM.replace(
        "        kept.append(record)",
        "        kept.append(record)\n        raise ValueError('a handler of mine')",
    )
    started = forked.start(
        program,
        meeting_file(),
        "own",
        env=os.environ | {"MUSTER_LOG_LEVEL": "trace"},
        stdout=-1,
        stderr=-1,
        text=True,
    )
    said, complained = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 0, complained
    assert complained.count("a handler of mine") == 1, complained
    assert len(said.splitlines()) > 1, said


# spec: V6.python to_logging and to_stderr may be called in any order, and twice
def test_switching_is_harmless():
    import muster.logs

    for _ in range(3):
        muster.logs.to_logging()
        muster.logs.to_logging(logging.getLogger("other"))
        muster.logs.to_stderr()
        muster.logs.to_stderr()
