# SPDX-License-Identifier: BSD-3-Clause
"""A real etcd for tests: Debian's, with its data in memory."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import pytest
from scratch import LIMIT_S, reserve_port


def _status(endpoint):
    request = urllib.request.Request(f"{endpoint}/v3/maintenance/status", b"{}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=2) as reply:
        return json.load(reply)


def _leads(endpoint):
    try:
        return _status(endpoint).get("leader", "0") != "0"
    except (urllib.error.URLError, OSError):
        return False


class EtcdCluster:
    """Members on this host, which start at once. `number` is a member's, from 0. Give it an end by
    `close`.
    """

    def __init__(self, members=1, *, host="127.0.0.1", options=()):
        memory = pathlib.Path("/dev/shm")
        self.folder = tempfile.mkdtemp(
            prefix="muster-etcd-", dir=memory if memory.is_dir() else None
        )
        self._clients, peers = (
            [f"http://{host}:{reserve_port()}" for _ in range(members)] for _ in range(2)
        )
        # One member elects itself at once; a busy machine must not change the leader of several.
        pace = ("20", "200") if members == 1 else ("50", "500")
        cluster = ",".join(f"m{each}={peer}" for each, peer in enumerate(peers))
        self._commands = [
            [
                *("etcd", "--name", f"m{each}", "--data-dir", f"{self.folder}/{each}"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster, "--heartbeat-interval", pace[0]),
                *("--election-timeout", pace[1], *options),
            ]
            for each, (client, peer) in enumerate(zip(self._clients, peers, strict=True))
        ]
        self._members = [None] * members
        for each in range(members):
            self._begin(each)
        for each in range(members):
            self._await(each)

    @property
    def endpoint(self):
        """The first member's."""
        return self._clients[0]

    def endpoints(self):
        return ",".join(self._clients)

    def start(self, number=0):
        """After `kill`, with the data that it had."""
        self._begin(number)
        self._await(number)

    def kill(self, number=0):
        self._members[number].kill()
        self._members[number].wait()

    def signal(self, signal, number=None):
        """Sends the signal to one member or to all."""
        for each in self._members if number is None else [self._members[number]]:
            each.send_signal(signal)

    def leader(self):
        """The number of the member that leads. Waits where a busy machine makes them elect."""
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            for number, each in enumerate(self._clients):
                with contextlib.suppress(OSError):  # it was too busy to answer
                    status = _status(each)
                    if status.get("leader") == status["header"]["member_id"]:
                        return number
            time.sleep(0.05)
        pytest.fail("no member of etcd leads")

    def ask(self, call, **body):
        """A call of the first member's JSON gateway, "kv/put" for instance."""
        request = urllib.request.Request(f"{self.endpoint}/v3/{call}", json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=LIMIT_S) as reply:
            return json.load(reply)

    def close(self):
        for each in range(len(self._members)):
            self.kill(each)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self, number):
        with open(f"{self.folder}/log{number}", "ab") as log:
            self._members[number] = subprocess.Popen(
                self._commands[number], stdout=log, stderr=log, env={"PATH": os.environ["PATH"]}
            )

    def _await(self, number):
        limit = time.monotonic() + LIMIT_S
        while not _leads(self._clients[number]):
            if self._members[number].poll() is not None or time.monotonic() > limit:
                log = pathlib.Path(self.folder, f"log{number}").read_text()
                self.close()
                pytest.fail("etcd did not start: " + log)
            time.sleep(0.05)


@contextlib.contextmanager
def etcd_cluster(members=1, **arguments):
    """Skips the test where etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server, or tools/setup as root")
    cluster = EtcdCluster(members, **arguments)
    try:
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def etcd_server():
    """The endpoint of a cluster of one."""
    with etcd_cluster() as cluster:
        yield cluster.endpoint


def keys_in(endpoint):
    """How many keys it holds."""
    every = {"key": "AA==", "range_end": "AA==", "count_only": True}
    request = urllib.request.Request(f"{endpoint}/v3/kv/range", json.dumps(every).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LIMIT_S) as reply:
        return int(json.load(reply).get("count", 0))
