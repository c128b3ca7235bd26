"""Backend ucc through the Python package, over UCC's stand-in (tests/ucc)."""

import os
import pathlib
import socket
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).resolve().parent / "mpi_program.py"


def start(rank, port, words):
    variables = {
        **os.environ,
        "MUSTER_UCC_LIBRARY": os.environ["MUSTER_UCC_STANDIN"],
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
# spec: A12 one test per cell: ucc; A9 is_ucc_available; A1 get_backend
# spec: G1 object collectives on ucc; H1 monitored_barrier on ucc; D1 new_group on ucc
def test_every_operation():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [start(rank, port, ["operations", "ucc"]) for rank in range(2)]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0 and "all is well" in said, said
