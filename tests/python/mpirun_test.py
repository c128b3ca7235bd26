# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that mpirun starts, on this host and on two, without MASTER_ADDR."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from scratch import LIMIT_S
from two_hosts import two_hosts

import muster as dist

DIGITS = pathlib.Path(dist.__file__).parents[2] / "bin/digits"
IMPI = pathlib.Path(__file__).parents[2] / ".cache/impi/bin/mpiexec.hydra"
SECRET = "a secret that the launcher passes on"

# Sums all ranks' numbers, twice: a second job of the same processes meets anew.
PROGRAM = """
import os, socket
import torch
import muster as dist
for _ in range(2):
    dist.init_process_group()
    ranks = torch.tensor([1 << dist.get_rank()])
    dist.all_reduce(ranks)
    rank, world, host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
    os.write(1, f"rank {rank} of {world} on {host} sum {ranks.item()}\\n".encode())  # whole
    dist.destroy_process_group()
"""


def launcher(kind):
    """Its program and the options that a test of root on few cores needs."""
    if kind == "openmpi":
        path, options = shutil.which("mpirun.openmpi"), ["--allow-run-as-root", "--oversubscribe"]
    elif kind == "mpich":
        path, options = shutil.which("mpiexec.hydra"), []
    else:
        path, options = (str(IMPI) if IMPI.exists() else None), []
    if path is None:
        pytest.skip(
            f"the launcher of {kind} is not installed: "
            "MUSTER_SERVICES=ON or MUSTER_RIVALS=ON tools/setup"
        )
    return [path, *options]


def run(words, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD_"))}
    done = subprocess.run(
        words,
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.stdout, done.returncode


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as both:
        yield both


# spec: R2.open_mpi[openmpi] R2.mpich[mpich] R2.intel_mpi[impi] mpirun ./program under Open MPI,
# MPICH and Intel MPI without MASTER_ADDR, backend native
@pytest.mark.parametrize("kind", ["openmpi", "mpich", "impi"])
def test_one_host(kind):
    out, status = run([*launcher(kind), "-n", "2", DIGITS])
    assert status == 0, out
    assert "FAILED" not in out and "held-out accuracy" in out, out


def on_two_hosts(kind, hosts, program, count):
    words = launcher(kind)
    each = count // 2
    if kind == "openmpi":
        words += [
            "--mca",
            "plm_rsh_agent",
            hosts.shell,
            "--mca",
            "oob_tcp_if_include",
            f"{hosts.network}.0/24",
        ]
        words += [
            "-x",
            "MUSTER_SECRET",
            "-x",
            "PYTHONPATH",
            "--host",
            f"localhost:{each},{hosts.second}:{each}",
        ]
    else:
        words += ["-launcher", "ssh", "-launcher-exec", hosts.shell]
        words += [
            "-iface",
            hosts.interface,
            "-hosts",
            f"{hosts.first}:{each},{hosts.second}:{each}",
        ]
    return hosts.words(*words, "-n", str(count), *program)


# spec: R2.hosts PMIx or PMI gives the address: ranks on two hosts, without MASTER_ADDR
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["openmpi", "mpich", "impi"])
def test_two_hosts(kind, hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = on_two_hosts(kind, hosts, [sys.executable, program], 4)
    out, status = run(words, MUSTER_SECRET=SECRET)
    assert status == 0, out
    found = re.findall(r"rank (\d) of 4 on (\S+) sum (\d+)", out)
    assert sorted(rank for rank, _, _ in found) == sorted("0123" * 2), out
    assert {total for _, _, total in found} == {"15"}, out
    assert len({host for _, host, _ in found}) == 2, out


# spec: R2.refusal without a secret a rank of another host is told what to set
def test_two_hosts_without_a_secret(hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out, status = run(on_two_hosts("openmpi", hosts, [sys.executable, program], 2))
    assert status != 0
    assert "MUSTER_SECRET" in out, out
