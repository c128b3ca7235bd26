# SPDX-License-Identifier: BSD-3-Clause
"""Backend mpi through the Python package, under each MPI that is installed: its mpirun starts
mpi_program.py.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from scratch import LIMIT_S

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache"
MPIRUN = {
    "openmpi": ["/usr/bin/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
    + ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"],
    "mpich": ["/usr/bin/mpirun.mpich"],
    "mpich5": [str(CACHE / "mpich/bin/mpirun")],
    "impi": [str(CACHE / "impi/bin/mpiexec.hydra")],
}
OF_INTEL = {
    "I_MPI_ROOT": str(CACHE / "impi"),
    "I_MPI_HYDRA_IFACE": "lo",
    "I_MPI_FABRICS": "shm",
    "I_MPI_PIN": "0",
    "I_MPI_THREAD_YIELD": "2",
}


def run(mpi, ranks, words):
    if not pathlib.Path(MPIRUN[mpi][0]).exists():
        pytest.skip(f"{MPIRUN[mpi][0]} is not installed; MUSTER_MPIS=ON tools/setup installs it")
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")
    }
    if mpi == "impi":
        variables.update(OF_INTEL)
    program = [sys.executable, str(HERE / "mpi_program.py"), *words]
    return subprocess.run(
        [*MPIRUN[mpi], "-n", str(ranks), *program],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


# spec: A4.no_address mpirun needs no address and no store; every operation of the documents' table
# on CPU tensors; A12.mpi one test per cell: mpi; A9 is_mpi_available; A1 get_backend; G1 object
# collectives on mpi; H1.mpi monitored_barrier on mpi; E2 recv from any rank on mpi; D1 new_group on
# mpi; D7 split_group on mpi; B10 init after destroy on mpi
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mpi", MPIRUN)
def test_every_operation(mpi):
    ended = run(mpi, 2, ["operations"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all is well") == 2, ended.stdout + ended.stderr


# spec: A4 A12 a world without MPI, and processes that no mpirun started, are refused by name
def test_what_cannot_work_is_named():
    program = [sys.executable, str(HERE / "mpi_program.py"), "refused"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    missing = dict(os.environ, MUSTER_MPI_LIBRARY="/no/such/libmpi.so")
    program[-1] = "missing"
    ended = subprocess.run(
        program, env=missing, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
