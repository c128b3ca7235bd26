# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of a bench on hosts that are network namespaces, until all have ended."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time


def demand_hosts(bench):
    """Ends this program, which is called `bench`, where no namespaces can be hosts."""
    if os.geteuid() != 0:
        sys.exit(f"{bench}: making network namespaces needs root")
    for program in ("ip", "tc"):
        if not shutil.which(program):
            sys.exit(f"{bench}: there is no {program}: apt-get install iproute2")


def run_workers(hosts, commands, limit_s, bench, stdout=None):
    """A command on each host at once; `stdout`, an open file, has what the first one prints. Ends
    this program if one fails or all take longer than the limit.
    """
    environment = os.environ | {
        "MUSTER_SECRET": secrets.token_hex(32),  # where no list of processes shows it
        "MUSTER_SOCKET_IFNAME": hosts.devices[0],
        "GLOO_SOCKET_IFNAME": hosts.devices[0],
        "OMP_NUM_THREADS": "1",
    }
    workers = []
    try:
        for host, words in enumerate(commands):
            words = [str(word) for word in (*hosts.inside(host), *words)]
            out = stdout if host == 0 else None
            workers.append(
                subprocess.Popen(words, env=environment, stdout=out, start_new_session=True)
            )
        wait(workers, hosts.relays, limit_s, bench)
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def lines_of_workers(hosts, commands, limit_s, bench):
    """As `run_workers`; what the first command prints, a JSON object on each line."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as lines:
        run_workers(hosts, commands, limit_s, bench, lines)
        lines.seek(0)
        return [json.loads(line) for line in lines]


def wait(workers, relays, limit_s, bench):
    """Until all have ended well, or one has not. Without a relay they would wait in vain."""
    end = time.monotonic() + limit_s
    while running := [worker for worker in workers if worker.poll() is None]:
        if any(worker.returncode for worker in workers):
            break
        if any(relay.poll() is not None for relay in relays):
            sys.exit(f"{bench}: the relay between the hosts has ended")
        if time.monotonic() > end:
            sys.exit(f"{bench}: no end after {limit_s} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(0.2)
    if any(worker.returncode for worker in workers):
        sys.exit(f"{bench}: a rank has failed")
