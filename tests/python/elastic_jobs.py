# SPDX-License-Identifier: BSD-3-Clause
"""Jobs under `muster run --elastic keep`, for the tests whose ranks and nodes die. The program is
tests/elastic/elastic_trainer.cc.
"""

import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import tempfile
import time

import pytest
from scratch import LIMIT_S

import muster

BIN = pathlib.Path(muster.__file__).parents[2] / "bin"
TRAINER = str(BIN / "elastic_trainer")
LONG = os.environ.get("MUSTER_TEST_LONG")
STEPS = 40


class Launcher:
    """One `muster run`, behind the words `inside`. Its workers may print as much as a pipe holds
    before anybody reads it.
    """

    def __init__(
        self,
        *words,
        ranks,
        options=("--standalone",),
        spares=0,
        log=None,
        environment=None,
        inside=(),
    ):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        if log:
            kept["ELASTIC_TRAINER_LOG"] = str(log)
        kept |= environment or {}
        self._said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*inside, str(BIN / "muster"), "run", *options, "--nproc-per-node", str(ranks)]
            + ["--elastic", "keep", "--max-restarts", "1000", "--spares", str(spares), *words],
            env=kept | {"MUSTER_SECRET": "a secret for the tests", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        self.end_descriptor = os.pidfd_open(self.process.pid)
        self.out = ""
        self._unread = b""  # has been read, and is no whole line yet

    def next_line(self, deadline):
        """The workers' next line, which is in `out` from then on; empty once they have ended.
        TimeoutError: there was none before `deadline`, a time of time.monotonic().
        """
        while b"\n" not in self._unread:
            left = max(0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError
            some = os.read(self.process.stdout.fileno(), 1 << 16)
            if not some:
                break
            self._unread += some
        if time.monotonic() > deadline:
            raise TimeoutError
        line, end, self._unread = self._unread.partition(b"\n")
        said = (line + end).decode()
        self.out += said
        return said

    def read_until(self, text, times=1, limit=LIMIT_S):
        """Reads the workers' output until new lines have had `text` as often as `times`. The test
        fails with all that was said if that takes longer than the limit, whatever else is printed.
        """
        deadline = time.monotonic() + limit
        try:
            while times > 0:
                line = self.next_line(deadline)
                if not line:
                    pytest.fail(f"never said: {text}\n{self.told()}")
                times -= text in line
        except TimeoutError:
            pytest.fail(f"not said within {limit} s: {text}\n{self.told()}")

    @property
    def err(self):
        self._said.seek(0)
        return self._said.read().decode()

    def end(self):
        """Waits for it; gives its exit code. `out` is whole then."""
        try:
            out, _ = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as late:
            self.process.kill()
            self.process.wait()
            self._add(late.output or b"")
            pytest.fail(f"does not end within {LIMIT_S} s\n{self.out}{self.err}")
        self._add(out)
        return self.process.returncode

    def _add(self, rest):
        self.out += (self._unread + rest).decode(errors="replace")
        self._unread = b""

    def told(self):
        """All that it said, for a failed test: it is killed if it lives."""
        if self.process.returncode is None:
            self.process.kill()
            self.end()
        return f"== exit code {self.process.returncode}\n{self.out}{self.err}"


def rendezvous(kind, endpoint, job, nodes="1:2"):
    """No node is lost by silence alone."""
    patience = "last_call_timeout=3600,keep_alive_interval=3600"
    if kind != "c10d":
        patience = "last_call_timeout=3600,keep_alive_interval=2,keep_alive_max_attempt=3"
    return ["--nnodes", nodes, "--rdzv-backend", kind, "--rdzv-endpoint", endpoint] + [
        *("--rdzv-id", job, "--rdzv-conf", patience)
    ]


def server_of(port, job, *words, more=()):
    """A node that serves the job's store."""
    options = rendezvous("c10d", f"127.0.0.1:{port}", job) + [*more]
    launcher = Launcher(*words, ranks=2, options=options)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return launcher
        except ConnectionRefusedError:
            assert launcher.process.poll() is None, launcher.told()
            time.sleep(0.01)


def train(*kills, ranks=3, spares=0, steps=STEPS):
    """On one node; gives its launcher, which has ended."""
    launcher = Launcher(TRAINER, str(steps), *kills, ranks=ranks, spares=spares)
    assert launcher.end() == 0, launcher.out + launcher.err
    return launcher


def weights(out, count):
    """The weights of all ranks, which are equal."""
    found = re.findall(r"finished at step \d+, weights (\w+)", out)
    assert len(found) == count, out
    assert len(set(found)) == 1, out
    return found[0]


def replace_killed(start, nodes):
    """Starts so many nodes by `start`, and another for each one that is killed, until all others
    have ended. Gives the launchers in the order of their ends.
    """
    living = [start() for _ in range(nodes)]
    ended = []
    while living:
        ready, _, _ = select.select([each.end_descriptor for each in living], [], [], LIMIT_S)
        if not ready:
            pytest.fail("the job does not end\n" + "".join(each.told() for each in living + ended))
        for each in [each for each in living if each.end_descriptor in ready]:
            living.remove(each)
            ended.append(each)
            if each.end() == -signal.SIGKILL:
                living.append(start())
    return ended
