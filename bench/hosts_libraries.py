# SPDX-License-Identifier: BSD-3-Clause
"""The libraries of `muster-lab hosts`: how each starts its ranks on the hosts, and how they are
asked. The orders and answers are those of src/faces/cli/bench/measurement.h.
"""

import contextlib
import os
import pathlib
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from hosts_places import command

HERE = pathlib.Path(__file__).parent
LIBRARIES = ("muster", "gloo", "openmpi")
PACKAGES = "apt-get install openmpi-bin libopenmpi-dev"
#: The first line that a rank of muster reads: other users see a command and its environment.
READ_SECRET = 'read -r MUSTER_SECRET && export MUSTER_SECRET && exec "$@"'


@dataclass
class Start:
    """A process that is started here."""

    who: str
    words: list
    first_line: str = ""


def muster(hosts, options, _folder):
    secret = secrets.token_hex(32)
    worker = [*interfaces("MUSTER_SOCKET_IFNAME", hosts), options.worker]
    words = ["sh", "-c", READ_SECRET, "sh", *worker]
    return on_each("muster", hosts, options, words, options.port, f"{secret}\n")


def gloo(hosts, options, _folder):
    words = [*interfaces("GLOO_SOCKET_IFNAME", hosts), sys.executable]
    words.append(HERE / "gloo_worker.py")
    return on_each("gloo", hosts, options, words, options.port + 1)


def openmpi(hosts, options, folder):
    program = folder / "mpi_worker"
    command("mpicc.openmpi -O2 -o", str(program), str(HERE / "mpi_worker.c"))
    ranks = options.ranks_per_host
    words = ["mpirun.openmpi", "--allow-run-as-root"]
    words += ["--host", ",".join(f"{address}:{ranks}" for address in hosts.addresses)]
    words += ["-n", ranks * len(hosts.names)]
    settings = {
        "plm_rsh_agent": hosts.agent(folder),
        "pml": "ob1",
        "btl": "tcp,vader,self",
    }
    if not hosts.dedicated(ranks):
        words.append("--oversubscribe")
        settings["mpi_yield_when_idle"] = 1
    if hosts.devices:
        settings["btl_tcp_if_include"] = ",".join(hosts.devices)
    for name, value in settings.items():
        words += ["--mca", name, value]
    return [Start("mpirun", hosts.launcher([*words, hosts.place(program)]))]


LAUNCHES = {"muster": muster, "gloo": gloo, "openmpi": openmpi}


def interfaces(name, hosts):
    return ["env", f"{name}={','.join(hosts.devices)}"] if hosts.devices else ["env"]


def on_each(library, hosts, options, words, port, first_line=""):
    ranks = options.ranks_per_host * len(hosts.names)
    meeting = ["--ranks", ranks, "--init", f"tcp://{hosts.addresses[0]}:{port}"]
    for rank in range(ranks):
        host = rank // options.ranks_per_host
        own = [*words, *meeting, "--rank", rank, "--timeout", options.timeout]
        yield Start(f"rank {rank} on {hosts.names[host]}", hosts.on(host, own, library), first_line)


class Contestant:
    """A library's ranks on the hosts, which wait for orders. Processes end with it."""

    def __init__(self, library, hosts, options, folder):
        self.library = library
        self.hosts = hosts
        self.counts_from = ("last" if options.latency else "first") if hosts.one_clock else "own"
        self.folder = pathlib.Path(folder) / library
        self.folder.mkdir()
        self.processes = []  # each with who it is
        self.unread = ""
        self.back, self.answers = os.pipe()
        for start in LAUNCHES[library](hosts, options, self.folder):
            self.start(start)

    def start(self, start):
        with open(self.folder / start.who, "wb") as log:
            process = subprocess.Popen(
                [str(word) for word in start.words],
                stdin=subprocess.PIPE,
                stdout=self.answers,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append((start.who, process))
        self.tell(process, start.first_line)

    @staticmethod
    def tell(process, text):
        # A process that reads no more has ended, which is seen later.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text.encode())
            process.stdin.flush()

    def play(self, op, size, seconds, patience):
        """Microseconds back to back and of one call, or None where there are no such figures."""
        for _, process in self.processes:
            self.tell(process, f"cell {op} {size} float32 private {seconds} 0 {self.counts_from}\n")
        limit = time.monotonic() + patience
        while True:
            kind, *words = (self.next_line() or " ").split(" ")
            if kind == "row":
                return float(words[0]), float(words[1])
            if kind == "skip":
                return None
            if kind == "error":
                return self.fail(" ".join(words))
            if ended := [found for found in self.processes if found[1].poll()]:
                texts = [f"{who} has ended with status {run.returncode}" for who, run in ended]
                return self.fail(", ".join(texts))
            if time.monotonic() > limit:
                return self.fail("it did not answer in time")

    def next_line(self):
        """The next line of the ranks' standard output; None if there is none yet."""
        if "\n" not in self.unread:
            if not select.select([self.back], [], [], 0.2)[0]:
                return None
            self.unread += os.read(self.back, 4096).decode(errors="replace")
        line, end, rest = self.unread.partition("\n")
        self.unread = rest if end else line
        return line if end else None

    def fail(self, why):
        print(f"{self.library}: {why}", file=sys.stderr)
        for who, _ in self.processes:
            log = (self.folder / who).read_text(encoding="utf-8", errors="replace").strip()
            if log:
                print(f"{who} said: {log[-1500:]}", file=sys.stderr)
        self.end()
        self.hosts.end(self.library)

    @property
    def ended(self):
        return not self.processes

    def end(self):
        for _, process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self.processes = []


def those_here(asked):
    """The libraries that can run; says of each other one what it lacks."""
    lacks = {"openmpi": None if shutil.which("mpicc.openmpi") else PACKAGES}
    for library in asked:
        if lacks.get(library):
            print(f"{library} is left out: {lacks[library]}", file=sys.stderr)
        else:
            yield library
