# SPDX-License-Identifier: BSD-3-Clause
"""A real etcd for tests: Debian's, of one member, with its data in memory."""

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


class EtcdServer:
    """A server of one member; starts at once. Give it an end by `close`."""

    def __init__(self, *options):
        memory = pathlib.Path("/dev/shm")
        self.folder = tempfile.mkdtemp(
            prefix="muster-etcd-", dir=memory if memory.is_dir() else None
        )
        self.endpoint, peer = (f"http://127.0.0.1:{reserve_port()}" for _ in range(2))
        self._command = [
            *("etcd", "--name", "m", "--data-dir", f"{self.folder}/data"),
            *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"m={peer}"),
            *("--heartbeat-interval", "20", "--election-timeout", "200", *options),
        ]
        self._server = None
        self.start()

    def start(self):
        """Also after `kill`, with the data that it had."""
        with open(f"{self.folder}/log", "ab") as log:
            environment = {"PATH": os.environ["PATH"]}
            self._server = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        limit = time.monotonic() + LIMIT_S
        while not _leads(self.endpoint):
            if self._server.poll() is not None or time.monotonic() > limit:
                log = pathlib.Path(self.folder, "log").read_text()
                self.close()
                pytest.fail("etcd did not start: " + log)
            time.sleep(0.05)

    def kill(self):
        self._server.kill()
        self._server.wait()

    def close(self):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, call, **body):
        """A call of its JSON gateway, "kv/put" for instance."""
        request = urllib.request.Request(f"{self.endpoint}/v3/{call}", json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=LIMIT_S) as reply:
            return json.load(reply)


@contextlib.contextmanager
def etcd_server(*options):
    """Its endpoint. Skips the test where etcd is not installed."""
    with etcd_process(*options) as server:
        yield server.endpoint


@contextlib.contextmanager
def etcd_process(*options):
    """As `etcd_server`, for tests that kill it, start it again, or fill it."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server, or tools/setup as root")
    server = EtcdServer(*options)
    try:
        yield server
    finally:
        server.close()


class EtcdCluster:
    """Members on this host; starts at once. `number` is a member's."""

    def __init__(self, members):
        memory = pathlib.Path("/dev/shm")
        self.folder = tempfile.mkdtemp(
            prefix="muster-etcd-", dir=memory if memory.is_dir() else None
        )
        clients, peers = (
            [f"http://127.0.0.1:{reserve_port()}" for _ in range(members)] for _ in range(2)
        )
        self._clients, self._members = clients, []
        cluster = ",".join(f"m{each}={peer}" for each, peer in enumerate(peers))
        for each in range(members):
            with open(f"{self.folder}/log{each}", "ab") as log:
                command = [
                    *("etcd", "--name", f"m{each}", "--data-dir", f"{self.folder}/{each}"),
                    *("--listen-client-urls", clients[each]),
                    *("--advertise-client-urls", clients[each]),
                    *("--listen-peer-urls", peers[each]),
                    *("--initial-advertise-peer-urls", peers[each], "--initial-cluster", cluster),
                    *("--heartbeat-interval", "50", "--election-timeout", "500"),
                ]
                environment = {"PATH": os.environ["PATH"]}
                self._members.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                )
        limit = time.monotonic() + LIMIT_S
        while not all(_leads(each) for each in clients):
            if time.monotonic() > limit:
                logs = pathlib.Path(self.folder).glob("log*")
                pytest.fail("etcd did not start: " + "".join(each.read_text() for each in logs))
            time.sleep(0.05)

    def endpoints(self):
        return ",".join(self._clients)

    def leader(self):
        """The number of the member that leads."""
        for number, each in enumerate(self._clients):
            status = _status(each)
            if status["leader"] == status["header"]["member_id"]:
                return number
        pytest.fail("no member of etcd leads")

    def signal(self, number, member=None):
        """Sends the signal to one member or to all."""
        for each in self._members if member is None else [self._members[member]]:
            each.send_signal(number)

    def close(self):
        for each in self._members:
            each.kill()
            each.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def etcd_cluster(members):
    """Skips the test where etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server, or tools/setup as root")
    cluster = EtcdCluster(members)
    try:
        yield cluster
    finally:
        cluster.close()


def keys_in(endpoint):
    """How many keys it holds."""
    every = {"key": "AA==", "range_end": "AA==", "count_only": True}
    request = urllib.request.Request(f"{endpoint}/v3/kv/range", json.dumps(every).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LIMIT_S) as reply:
        return int(json.load(reply).get("count", 0))
