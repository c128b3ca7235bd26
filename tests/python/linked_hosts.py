# SPDX-License-Identifier: BSD-3-Clause
"""Numbered hosts on one machine, as network namespaces on a bridge, whose links can be cut, slowed,
or cut between two of them only. This machine reaches them all, by the bridge.
"""

import contextlib
import itertools
import os
import shutil
import subprocess

import pytest

# Nothing has this address, so what is sent there is lost without a word.
NOWHERE = "02:00:00:00:00:01"


def _run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _ip(*words):
    _run("ip", *words)


class LinkedHosts:
    """Needs root and iproute2. Give it an end by `close`."""

    def __init__(self, count):
        self.count = count
        self._name = f"mul{os.getpid() % 1000000}"
        self._network = f"10.78.{1 + os.getpid() % 250}"
        #: Of this machine.
        self.bridge_address = f"{self._network}.254"
        try:
            self._make()
        except OSError:
            self.close()
            raise

    def _make(self):
        _ip("link", "add", self._name, "type", "bridge")
        _ip("addr", "add", f"{self.bridge_address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for host in range(self.count):
            space, port = self._space(host), self._port(host)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "wire", "netns", space)
            _ip("link", "set", port, "master", self._name, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "wire")
            _ip("-n", space, "link", "set", "wire", "up")

    def _space(self, host):
        return f"{self._name}h{host}"

    def _port(self, host):
        return f"{self._name}p{host}"

    def address(self, host):
        return f"{self._network}.{host + 1}"

    def inside(self, host):
        """The words before a command that runs there."""
        return ["ip", "netns", "exec", self._space(host)]

    def cut_off(self, host):
        """From all."""
        _ip("link", "set", self._port(host), "down")

    def join(self, host):
        _ip("link", "set", self._port(host), "up")

    def cut(self, one, other):
        """Both reach all others."""
        for here, there in itertools.permutations([one, other]):
            words = ["neigh", "replace", self.address(there), "lladdr", NOWHERE]
            _ip("-n", self._space(here), *words, "dev", "wire", "nud", "permanent")

    def mend(self, one, other):
        for here, there in itertools.permutations([one, other]):
            _ip("-n", self._space(here), "neigh", "del", self.address(there), "dev", "wire")

    def slow(self, host, rate):
        """What it sends; `rate` as tc writes it, "10mbit"."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "200ms")
        _run("tc", "-n", self._space(host), "qdisc", "replace", "dev", "wire", *shape)

    def make_quick(self, host):
        _run("tc", "-n", self._space(host), "qdisc", "del", "dev", "wire", "root")

    def close(self):
        for words in (
            *(["ip", "netns", "del", self._space(host)] for host in range(self.count)),
            *(["ip", "link", "del", self._port(host)] for host in range(self.count)),
            ["ip", "link", "del", self._name],
        ):
            subprocess.run(words, capture_output=True)


@contextlib.contextmanager
def linked_hosts(count):
    """Skips the test where this user may make no network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts as network namespaces need root and iproute2")
    try:
        hosts = LinkedHosts(count)
    except OSError as error:
        pytest.skip(f"no hosts can be made: {error}")
    with contextlib.closing(hosts):
        yield hosts
