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
from scratch import reserve_port


def _leads(endpoint):
    request = urllib.request.Request(f"{endpoint}/v3/maintenance/status", b"{}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=2
        ) as reply:
            return json.load(reply).get("leader", "0") != "0"
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def etcd_server():
    """Its endpoint. Skips the test where etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server, or tools/setup as root")
    memory = pathlib.Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="muster-etcd-", dir=memory if memory.is_dir() else None)
    endpoint, peer = (f"http://127.0.0.1:{reserve_port()}" for _ in range(2))
    with open(f"{folder}/log", "wb") as log:
        server = subprocess.Popen(
            [
                "etcd",
                "--name",
                "m",
                "--data-dir",
                f"{folder}/data",
                "--listen-client-urls",
                endpoint,
            ]
            + ["--advertise-client-urls", endpoint, "--listen-peer-urls", peer]
            + ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"m={peer}"]
            + ["--heartbeat-interval", "20", "--election-timeout", "200"],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
        )
    try:
        limit = time.monotonic() + 30
        while not _leads(endpoint):
            if server.poll() is not None or time.monotonic() > limit:
                pytest.fail("etcd did not start: " + pathlib.Path(folder, "log").read_text())
            time.sleep(0.05)
        yield endpoint
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def keys_in(endpoint):
    """How many keys it holds."""
    every = {"key": "AA==", "range_end": "AA==", "count_only": True}
    request = urllib.request.Request(f"{endpoint}/v3/kv/range", json.dumps(every).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as reply:
        return int(json.load(reply).get("count", 0))
