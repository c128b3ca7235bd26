# SPDX-License-Identifier: BSD-3-Clause
"""Hosts on one machine, as network namespaces on a bridge, between any two of which the link can be
cut while both reach all others.
"""

import contextlib
import itertools
import os
import shutil
import subprocess

import pytest

# Nothing has this address, so what is sent there is lost without a word.
NOWHERE = "02:00:00:00:00:01"


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class LinkedHosts:
    def __init__(self, count, number):
        self.count = count
        self.name = f"mul{os.getpid() % 1000000}"
        self.network = f"10.78.{number}"

    def address(self, host):
        return f"{self.network}.{host + 1}"

    def space(self, host):
        return f"{self.name}h{host}"

    def inside(self, host):
        """The words before a command that runs there."""
        return ["ip", "netns", "exec", self.space(host)]

    def make(self):
        hub = self.name + "hub"
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge0", "up")
        for host in range(self.count):
            space, port = self.space(host), f"port{host}"
            ip("netns", "add", space)
            peer = ["peer", "name", "wire0", "netns", space]
            ip("-n", hub, "link", "add", port, "type", "veth", *peer)
            ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "wire0")
            ip("-n", space, "link", "set", "wire0", "up")

    def cut(self, one, other):
        for here, there in itertools.permutations([one, other]):
            words = ["neigh", "replace", self.address(there), "lladdr", NOWHERE]
            ip("-n", self.space(here), *words, "dev", "wire0", "nud", "permanent")

    def mend(self, one, other):
        for here, there in itertools.permutations([one, other]):
            ip("-n", self.space(here), "neigh", "del", self.address(there), "dev", "wire0")

    def remove(self):
        for space in [self.name + "hub", *map(self.space, range(self.count))]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@contextlib.contextmanager
def linked_hosts(count):
    """Skips the test where this user may make no network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts as network namespaces need root and iproute2")
    hosts = LinkedHosts(count, 1 + os.getpid() % 250)
    try:
        try:
            hosts.make()
        except OSError as error:
            pytest.skip(f"no hosts can be made: {error}")
        yield hosts
    finally:
        hosts.remove()
