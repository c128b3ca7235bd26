# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of campaign.py's jobs as network namespaces on one bridge, and a small disk."""

import os
import pathlib
import shutil
import subprocess
import tempfile


def run(*words, check=True):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Numbered hosts, joined by links that can be cut, slowed, or cut between two of them; the
    bridge is this host, which reaches all. Needs root and iproute2.
    """

    def __init__(self, count):
        self.count = count
        self._tag = f"mc{os.getpid() % 100000}"
        self._net = f"10.79.{1 + os.getpid() % 250}"
        self.bridge_address = f"{self._net}.254"
        run("ip", "link", "add", self._tag, "type", "bridge")
        run("ip", "addr", "add", f"{self.bridge_address}/24", "dev", self._tag)
        run("ip", "link", "set", self._tag, "up")
        for host in range(count):
            space, port = self._space(host), self._port(host)
            run("ip", "netns", "add", space)
            link = ("ip", "link", "add", port, "type", "veth", "peer", "name", "wire")
            run(*link, "netns", space)
            run("ip", "link", "set", port, "master", self._tag, "up")
            for words in (
                ("addr", "add", f"{self.address(host)}/24", "dev", "wire"),
                ("link", "set", "wire", "up"),
                ("link", "set", "lo", "up"),
            ):
                run("ip", "-n", space, *words)

    def _space(self, host):
        return f"{self._tag}h{host}"

    def _port(self, host):
        return f"{self._tag}p{host}"

    def address(self, host):
        return f"{self._net}.{host + 1}"

    def words(self, host):
        """What stands before a command that shall run there."""
        return ["ip", "netns", "exec", self._space(host)]

    def cut(self, host):
        run("ip", "link", "set", self._port(host), "down")

    def join(self, host):
        run("ip", "link", "set", self._port(host), "up")

    def cut_between(self, one, other):
        """Their frames go to an address that no host has; both reach everybody else."""
        for here, there in ((one, other), (other, one)):
            self._neighbour(
                "replace", here, there, "lladdr", "02:00:00:00:00:99", "nud", "permanent"
            )

    def join_between(self, one, other):
        for here, there in ((one, other), (other, one)):
            self._neighbour("del", here, there)

    def _neighbour(self, verb, here, there, *more):
        words = ("neigh", verb, self.address(there), *more, "dev", "wire")
        run("ip", "-n", self._space(here), *words)

    def slow(self, host, rate):
        """`rate` as tc writes it, "10mbit"."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "200ms")
        run("tc", "-n", self._space(host), "qdisc", "replace", "dev", "wire", *shape)

    def make_quick(self, host):
        run("tc", "-n", self._space(host), "qdisc", "del", "dev", "wire", "root")

    def close(self):
        for host in range(self.count):
            run("ip", "netns", "del", self._space(host), check=False)
            run("ip", "link", "del", self._port(host), check=False)
        run("ip", "link", "del", self._tag, check=False)


class SmallDisk:
    """A file system of some megabytes that can be filled."""

    def __init__(self, megabytes=16):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-chaos-disk-"))
        size = f"size={megabytes}m"
        run("mount", "-t", "tmpfs", "-o", size, "muster-chaos", self.folder)
        self._ballast = self.folder / "ballast"

    def fill(self):
        try:
            with open(self._ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            pass  # full

    def empty(self):
        self._ballast.unlink(missing_ok=True)

    def close(self):
        run("umount", "-l", self.folder, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
