# SPDX-License-Identifier: BSD-3-Clause
"""`muster doctor --links` between hosts that are network namespaces."""

import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import sys

from linked_hosts import linked_hosts
from scratch import LIMIT_S

import muster

PACKAGE = pathlib.Path(muster.__file__).parents[1]
MUSTER = PACKAGE.parent / "bin/muster"
PORT = "29500"  # in namespaces of their own

# A rank that uses its links, and stays until its standard input ends.
RANK = """
import sys, torch, muster as dist
dist.init_process_group()
for _ in range(3):
    dist.all_reduce(torch.ones(1 << 20))
print("met", flush=True)
sys.stdin.read()
dist.destroy_process_group()
"""


@contextlib.contextmanager
def started(hosts, host, secret, *words, **ranks):
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE), MUSTER_SECRET=secret)
    environment |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT, **ranks}
    named = ["unshare", "-u", "sh", "-c", f'hostname node{host}; exec "$@"', "sh"]
    process = subprocess.Popen(
        [*hosts.inside(host), *named, *map(str, words)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def ranks_on(hosts, secret, *words):
    """The same program on each host, as the ranks of a job."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(hosts, host, secret, *words, RANK=str(host), WORLD_SIZE=str(hosts.count))
            )
            for host in range(hosts.count)
        ]


def links_in(text):
    told = json.loads(text)["links"]
    return {(each["from"], each["to"]): each for each in told}


# spec: X4.links as the ranks of a job: the rate and the round trip between each two hosts
def test_measures_between_hosts():
    with linked_hosts(3) as hosts:
        hosts.slow(1, "20mbit")
        words = (MUSTER, "doctor", "--links", "--json")
        with ranks_on(hosts, secrets.token_hex(32), *words) as ranks:
            said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
            assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert said[1:] == ["", ""]
    found = links_in(said[0])
    names = [f"node{host} (rank {host})" for host in range(3)]
    assert set(found) == {(one, other) for one in names for other in names if one != other}
    for (one, _), link in found.items():
        assert link["round_trip_ms"] > 0 and link["mbit_per_s"] > 0
        if one == names[1]:
            assert link["mbit_per_s"] < 22  # what tc lets pass


# spec: X4.links of a running job, as measured while it used its links
def test_tells_of_a_running_job():
    secret = secrets.token_hex(32)
    with linked_hosts(2) as hosts, ranks_on(hosts, secret, sys.executable, "-c", RANK) as ranks:
        assert [rank.stdout.readline() for rank in ranks] == ["met\n", "met\n"]
        job = f"{hosts.address(0)}:{PORT}"
        words = (MUSTER, "doctor", "--job", job, "--links", "--json")
        with started(hosts, 0, secret, *words) as doctor:
            found = links_in(doctor.communicate(timeout=LIMIT_S)[0])
        for rank in ranks:
            rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0
    assert set(found) == {
        ("node0 (rank 0)", "node1 (rank 1)"),
        ("node1 (rank 1)", "node0 (rank 0)"),
    }
    for link in found.values():
        assert link["round_trip_ms"] > 0 and link["mbit_per_s"] > 0


# spec: X4.refusal without a job there is nothing to measure
def test_needs_a_job():
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    words = [MUSTER, "doctor", "--links"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "muster run --hosts" in done.stderr
