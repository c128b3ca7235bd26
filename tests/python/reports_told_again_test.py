# SPDX-License-Identifier: BSD-3-Clause
"""A node's report does not reach the membership service at first, while the node's lease lives: it
is told until it has arrived, and the job goes on as if it had arrived at once.
"""

import base64
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
import urllib.error

import pytest
from etcd_server import etcd_cluster
from scratch import LIMIT_S, reserve_port

import muster

MUSTER = str(pathlib.Path(muster.__file__).parents[2] / "bin" / "muster")
QUOTA = 16 << 20
OUTAGE_S = 1
NOT_YET = "what this node says of itself has not reached"

# A worker of node A fails in the first epoch when it is told to; all others end well when they are.
WORKER = """
echo $NODE $MUSTER_EPOCH >> log
while true; do
  if [ -e fail ] && [ $NODE$MUSTER_EPOCH = A1 ]; then echo A fails >> log; {how}; fi
  if [ -e end ] && [ $NODE$MUSTER_EPOCH != A1 ]; then exit 0; fi
  sleep 0.1
done
"""


class Job:
    """Two nodes, A and B, with a worker each."""

    def __init__(self, folder, how):
        self.folder, self.nodes = folder, {}
        (folder / "worker.sh").write_text(WORKER.format(how=how))

    def start(self, name, *options):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        with open(self.folder / f"said by {name}", "wb") as said:
            self.nodes[name] = subprocess.Popen(
                [MUSTER, "run", "--rdzv-id", "job", "--max-restarts", "3", "--nproc-per-node", "1"]
                + [*options, "sh", "worker.sh"],
                cwd=self.folder,
                env=kept | {"MUSTER_SECRET": "a secret for the tests", "NODE": name},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def until(self, what, happens):
        limit = time.monotonic() + LIMIT_S
        while not happens():
            assert time.monotonic() < limit, f"{what}\n{self.told()}"
            time.sleep(0.02)

    def until_begun(self, *workers):
        log = self.folder / "log"
        self.until(
            f"{workers} do not begin",
            lambda: log.exists() and set(workers) <= set(log.read_text().splitlines()),
        )

    def until_said(self, node, text):
        self.until(f"{node} does not say: {text}", lambda: text in self.said(node))

    def tell(self, word):
        (self.folder / word).touch()

    def said(self, node):
        return (self.folder / f"said by {node}").read_text()

    def told(self):
        return "".join(f"== {node}\n{self.said(node)}" for node in self.nodes)

    def end(self, *nodes):
        """All of them end well."""
        self.tell("end")
        for node in nodes:
            assert self.nodes[node].wait(timeout=LIMIT_S) == 0, self.told()


@contextlib.contextmanager
def job_of(folder, how):
    job = Job(folder, how)
    try:
        yield job
    finally:
        for node in job.nodes.values():
            node.kill()
            node.wait()


def meet_in_etcd(job, server, lease, nodes="2"):
    for name in "AB":
        job.start(
            name,
            *("--nnodes", nodes, "--rdzv-backend", "etcd", "--rdzv-endpoint"),
            *(server.endpoint.removeprefix("http://"), "--rdzv-conf"),
            f"{lease},last_call_timeout=3600",
        )
    job.until_begun("A 1", "B 1")


def fill(server):
    """Until it takes no more; leases live on. Gives its last revision."""
    value = base64.b64encode(bytes(1 << 20)).decode()
    for _ in range(2 * QUOTA >> 20):
        try:
            revision = server.ask("kv/put", key=base64.b64encode(b"fill").decode(), value=value)
        except urllib.error.HTTPError as error:
            assert b"space" in error.read()
            return revision["header"]["revision"]
    pytest.fail("etcd has no quota")


def empty(server, revision):
    server.ask("kv/compaction", revision=revision, physical=True)
    server.ask("maintenance/defragment")
    for alarm in server.ask("maintenance/alarm", action="GET").get("alarms", []):
        server.ask("maintenance/alarm", action="DEACTIVATE", **alarm)


# spec: L11 etcd out of space: the report of a worker's failure is told until it is taken, the log
# says so, and the failure costs one restart
def test_etcd_out_of_space(tmp_path):
    quota = ("--quota-backend-bytes", str(QUOTA))
    with etcd_cluster(options=quota) as server, job_of(tmp_path, "exit 3") as job:
        meet_in_etcd(job, server, "keep_alive_interval=5,keep_alive_max_attempt=3")
        revision = fill(server)
        job.tell("fail")
        job.until_said("A", NOT_YET)
        empty(server, revision)
        job.until_begun("A 2", "B 2")
        job.end("A", "B")
        assert "restart 1 of 3" in job.said("B"), job.told()
        assert "lost its place" not in job.told(), job.told()


# spec: L11 etcd: a failure that is told beside the loss of a node waits until the lease of that
# could have ended, and is no restart then
def test_a_failure_waits_for_a_loss(tmp_path):
    quota = ("--quota-backend-bytes", str(QUOTA))
    with etcd_cluster(options=quota) as server, job_of(tmp_path, "exit 3") as job:
        meet_in_etcd(job, server, "keep_alive_interval=5,keep_alive_max_attempt=2", nodes="1:2")
        revision = fill(server)
        job.tell("fail")
        job.until_said("A", NOT_YET)
        job.nodes["B"].send_signal(signal.SIGKILL)
        empty(server, revision)
        job.until_begun("A 2")
        job.end("A")
        assert "is gone" in job.said("A"), job.told()
        assert "; starting all workers again on 1 node" in job.said("A"), job.told()
        assert "restart 0 of 3" in job.said("A"), job.told()


# spec: L14.service etcd is away for less than a lease's time while a worker is killed: its report
# arrives afterwards, and no node has lost its place
def test_an_outage_of_etcd(tmp_path):
    with etcd_cluster() as server, job_of(tmp_path, "kill -9 $$") as job:
        meet_in_etcd(job, server, "keep_alive_interval=60,keep_alive_max_attempt=2")
        server.kill()
        job.tell("fail")
        job.until_begun("A fails")
        time.sleep(OUTAGE_S)  # the fault itself: a launcher tells at once
        server.start()
        job.until_begun("A 2", "B 2")
        job.end("A", "B")
        assert "restart 1 of 3" in job.said("B"), job.told()
        assert "lost its place" not in job.told(), job.told()


class Relay:
    """Carries connections to a port of this host, from the same port of another address. While it
    is `cut`, what a client sends ends its connection, and no other one is made; those that are
    silent stay.
    """

    HOST = "127.0.0.2"

    def __init__(self, port):
        self.target, self.cut, self.carried, self.refused = port, False, 0, 0
        self.listener = socket.create_server((self.HOST, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self.cut:
                self.refused += 1
                client.close()
                continue
            self.carried += 1
            server = socket.create_connection(("127.0.0.1", self.target))
            for ends, by_client in (((client, server), True), ((server, client), False)):
                threading.Thread(target=self._carry, args=(*ends, by_client), daemon=True).start()

    def _carry(self, source, to, by_client):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.cut and by_client:
                    break
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


# spec: L14.service agent: the connection for requests breaks and no other one is to be had for less
# than a lease's time: the report of a killed worker arrives afterwards
def test_an_outage_of_the_agent(tmp_path):
    lease = "keep_alive_interval=60,keep_alive_max_attempt=2,last_call_timeout=3600"
    with job_of(tmp_path, "kill -9 $$") as job:
        port = reserve_port()
        relay = Relay(port)
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", lease]
        job.start("B", *options, "--rdzv-endpoint", f"127.0.0.1:{port}")
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert job.nodes["B"].poll() is None, job.told()
                time.sleep(0.02)
        job.start("A", *options, "--rdzv-endpoint", f"{relay.HOST}:{port}")
        job.until_begun("A 1", "B 1")
        assert relay.carried > 1, "A's connections do not pass here"
        relay.cut = True
        job.tell("fail")
        job.until_begun("A fails")
        job.until("A asks nobody", lambda: relay.refused > 0)
        relay.cut = False
        job.until_begun("A 2", "B 2")
        job.end("A", "B")
        assert "restart 1 of 3" in job.said("B"), job.told()
        assert "lost its place" not in job.told(), job.told()
        relay.listener.close()
