# SPDX-License-Identifier: BSD-3-Clause
"""Backend ucc through the Python package, over UCC's stand-in (tests/ucc)."""

import os
import pathlib
import subprocess
import sys

import pytest
from scratch import LIMIT_S, reserve_port

STANDIN = os.environ.get("MUSTER_UCC_STANDIN")
PROGRAM = pathlib.Path(__file__).resolve().parent / "mpi_program.py"


def start(rank, port, words):
    variables = {
        **os.environ,
        "MUSTER_UCC_LIBRARY": STANDIN,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# spec: A5 every operation of the documents' table on CPU tensors, ucc, and cpu:ucc for a group
# spec: A12.ucc one test per cell: ucc; A9 is_ucc_available; A1 get_backend
# spec: G1 object collectives on ucc; H1.ucc monitored_barrier on ucc; D1 new_group on ucc
@pytest.mark.skipif(STANDIN is None, reason="MUSTER_UCC_STANDIN names no stand-in of UCC")
def test_every_operation():
    port = reserve_port()
    ranks = [start(rank, port, ["operations", "ucc"]) for rank in range(2)]
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0 and "all is well" in said, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
