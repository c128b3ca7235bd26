# SPDX-License-Identifier: BSD-3-Clause
"""A second host for launchers that reach hosts by ssh: a network namespace with its own name."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

# Stands for ssh: skips its options, then runs the command where the name says.
SHELL = """#!/bin/sh
while :; do case "$1" in -*) shift;; *) break;; esac; done
host=$1; shift
[ "$host" = {second} ] || exec sh -c "$*"
exec ip netns exec {space} unshare -u sh -c "hostname {second}; $*"
"""


class TwoHosts:
    """`first` is this host, `second` the other; `words` gives commands that know both names."""

    def __init__(self, folder, number):
        self.folder = folder
        self.first, self.second = "muster-one", "muster-two"
        self.network = f"10.77.{number}"
        self.interface = f"mus{os.getpid() % 1000000}"
        self.shell = folder / "shell"

    def words(self, *command):
        inside = f'mount --bind {self.folder / "hosts"} /etc/hosts && exec "$@"'
        return ["unshare", "-m", "sh", "-c", inside, "sh", *map(str, command)]


@contextlib.contextmanager
def two_hosts():
    """Skips the test where this user may make no network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a second host needs root and iproute2")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-hosts-"))
    hosts = TwoHosts(folder, 1 + os.getpid() % 250)
    space, wire = hosts.interface, hosts.interface
    inside = ["ip", "netns", "exec", space]

    def run(*words):
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no second host can be made: {' '.join(words)}: {done.stderr.strip()}")

    try:
        run("ip", "netns", "add", space)
        run("ip", "link", "add", wire, "type", "veth", "peer", "name", "wire0", "netns", space)
        run("ip", "addr", "add", f"{hosts.network}.1/24", "dev", wire)
        run("ip", "link", "set", wire, "up")
        run(*inside, "ip", "addr", "add", f"{hosts.network}.2/24", "dev", "wire0")
        run(*inside, "ip", "link", "set", "wire0", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "route", "add", "default", "via", f"{hosts.network}.1")
        names = f"\n{hosts.network}.1 {hosts.first}\n{hosts.network}.2 {hosts.second}\n"
        (folder / "hosts").write_text(pathlib.Path("/etc/hosts").read_text() + names)
        hosts.shell.write_text(SHELL.format(second=hosts.second, space=space))
        hosts.shell.chmod(0o755)
        yield hosts
    finally:
        subprocess.run(["ip", "link", "del", wire], capture_output=True)
        subprocess.run(["ip", "netns", "del", space], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
