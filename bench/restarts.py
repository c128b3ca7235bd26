#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""How long a job of three hosts needs from a death to the first step of its new round: muster run
--elastic=restart beside torchrun, in the same run.

    bench/restarts.py                          (with Debian's etcd-server; on a machine that does
    bench/restarts.py --events worker,join      nothing else)

A host is a launcher of this machine with two workers. The launchers of muster meet in an etcd that
is started here, those of torchrun by c10d, whose store is in the first launcher. Both keep their
own defaults (last_call_timeout is 30 s), but may restart without limit, and torchrun's workers do
not use its agents' store, where they do not find each other after some restarts. Events:

    worker      one worker is killed
    launcher    the launcher of a host without rank 0 is killed, and not its workers
    host        the launcher of rank 0 and its workers are killed at once
    join        a third launcher starts beside two

The workers call all_reduce in a loop and write a line after each step. Time runs from right before
kill(2), or from the start of the launcher, until all ranks of the new round have written a line.
Hosts that died are started again between events. Libraries:

    muster      the worker is this file, which imports torch
    muster-c++  the worker is muster_bench_restarts
    torchrun    the worker is this file, with torch.distributed on Gloo

Shown are the median, the least and the most of the rounds that ended within --limit, in seconds.
`job lost`: every launcher ended. `no new round`: the survivors never stepped again. With --gate the
exit code is 1 where an event of muster's took 3 s or more in the median, or was not survived; for a
launcher or a host that needs --keep-alive 2, as etcd's lease is 5 s by default.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from words import words_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIBRARIES = ("muster", "muster-c++", "torchrun")
EVENTS = ("worker", "launcher", "host", "join")
HOSTS, LEAST_HOSTS, WORKERS = 3, 2, 2
PROMISED_S = 3
RESTARTS = 1000000
MARK = "MUSTER_BENCH_HOST"


class NotSurvivedError(Exception):
    """There is no new round."""


def work(library, folder):
    """A rank. A line is: time in ns, round, restart count, step, rank, world size, pid, host."""
    begun = time.monotonic_ns()
    import torch

    if library == "muster":
        import muster as dist

        dist.init_process_group()
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "?")
    with pathlib.Path(folder, str(os.getpid())).open("a", buffering=1) as file:
        step = 0
        while True:
            # The round's name, which all ranks learn from rank 0: when that process began.
            # torchrun's restart count stays where only the membership changes.
            name = torch.tensor([begun if rank == 0 else 0])
            dist.all_reduce(name)
            words = (time.monotonic_ns(), name.item(), restarts, step, rank, size, os.getpid())
            print(*words, os.environ[MARK], file=file)
            step += 1
            time.sleep(0.01)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def marked(mark):
    """Processes that were started with this mark in their environment, but zombies."""
    word = f"{MARK}={mark}\0".encode()
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class Etcd:
    """Debian's etcd, of one member, with its data in memory."""

    def __enter__(self):
        memory = pathlib.Path("/dev/shm")
        self.folder = tempfile.mkdtemp(
            prefix="muster-etcd-", dir=memory if memory.is_dir() else None
        )
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.endpoint = client.removeprefix("http://")
        words = ["etcd", "--name", "m", "--data-dir", f"{self.folder}/data"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", f"m={peer}"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(words, stdout=quiet, stderr=quiet)
        limit = time.monotonic() + 30
        while not self.leads():
            if self.process.poll() is not None or time.monotonic() > limit:
                self.__exit__()
                sys.exit("restarts: etcd did not start")
            time.sleep(0.05)
        return self

    def leads(self):
        request = urllib.request.Request(f"http://{self.endpoint}/v3/maintenance/status", b"{}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(urllib.error.URLError, OSError):
            with opener.open(request, timeout=2) as reply:
                return json.load(reply).get("leader", "0") != "0"
        return False

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Job:
    """Launchers and the lines of their workers."""

    count = 0

    def __init__(self, library, options, etcd):
        self.library, self.options = library, options
        Job.count += 1
        self.name = f"restarts{os.getpid()}-{Job.count}"
        self.folder = tempfile.mkdtemp(prefix="muster-bench-")
        self.steps = pathlib.Path(self.folder, "steps")
        self.steps.mkdir()
        self.endpoint = etcd.endpoint if library != "torchrun" else f"127.0.0.1:{free_port()}"
        self.hosts = {}  # launchers by mark
        self.started = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for mark in list(self.hosts):
            self.end(mark)
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self):
        options = ["--nnodes", f"{LEAST_HOSTS}:{HOSTS}", "--nproc-per-node", str(WORKERS)]
        options += ["--max-restarts", str(RESTARTS), "--rdzv-id", self.name]
        options += ["--rdzv-endpoint", self.endpoint]
        script = [str(pathlib.Path(__file__).resolve()), "--work", self.library, str(self.steps)]
        if self.library == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            options += ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
            return [*torchrun, *options, *script]
        bin_folder = f"{self.options.build}/bin"
        run = [f"{bin_folder}/muster", "run", "--elastic", "restart", *options]
        run += ["--rdzv-backend", "etcd"]
        if self.options.keep_alive:
            keep_alive = f"keep_alive_interval={self.options.keep_alive},keep_alive_max_attempt=1"
            run += ["--rdzv-conf", keep_alive]
        if self.library == "muster-c++":
            return [*run, f"{bin_folder}/muster_bench_restarts", str(self.steps)]
        return [*run, *script]

    def start(self):
        self.started += 1
        mark = f"{self.name}-{self.started}"
        python = pathlib.Path(sys.executable).parent
        environment = {
            **os.environ,
            MARK: mark,
            "OMP_NUM_THREADS": "1",
            # With the agents' store torchrun's workers wait for each other for ever where not all
            # agents have counted the same restarts.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PATH": f"{python}:{os.environ['PATH']}",
        }
        if self.library == "muster":
            environment["PYTHONPATH"] = f"{self.options.build}/python"
        with open(f"{self.folder}/{mark}.log", "wb") as log:
            self.hosts[mark] = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, mark):
        """A host dies: its launcher and workers at once. Returns the time right before."""
        launcher = self.hosts.pop(mark)
        others = [each for each in marked(mark) if each != launcher.pid]
        began = time.monotonic_ns()
        if launcher.poll() is None:
            launcher.kill()
        kill(others)
        launcher.wait()
        while left := marked(mark):  # one that had just been forked
            kill(left)
            time.sleep(0.01)
        return began

    def rounds(self):
        """By name: the first line of each rank. Those come first whose first line does."""
        found = {}
        for file in self.steps.iterdir():
            first, newline, _ = file.read_text().partition("\n")
            if newline:
                at, name, _, _, rank, size, process, mark = first.split()
                line = (int(at), int(size), int(process), mark)
                found.setdefault(int(name), {})[int(rank)] = line
        return found

    def wait(self, hosts, after=0):
        """The first round of so many hosts of which all ranks have stepped after that time."""
        limit = time.monotonic() + self.options.limit
        while time.monotonic() < limit:
            for ranks in self.rounds().values():
                full = len(ranks) == hosts * WORKERS == next(iter(ranks.values()))[1]
                if full and min(line[0] for line in ranks.values()) > after:
                    return ranks
            if all(launcher.poll() is not None for launcher in self.hosts.values()):
                raise NotSurvivedError("job lost")
            time.sleep(0.02)
        raise NotSurvivedError("no new round")

    def settle(self, hosts, ranks):
        """Makes them so many hosts that step; `ranks`: the round before, if there is one."""
        while len(self.hosts) > hosts:
            self.end(next(mark for mark in self.hosts if mark != ranks[0][3]))
        while len(self.hosts) < hosts:
            self.start()
        if ranks is not None and len(ranks) == hosts * WORKERS:
            return ranks
        return self.wait(hosts, max((line[0] for line in (ranks or {}).values()), default=0))


def happen(job, event, ranks):
    """Makes the event happen. Returns the time right before, and the number of hosts after."""
    zero = ranks[0][3]
    if event == "host":
        return job.end(zero), HOSTS - 1
    if event == "join":
        began = time.monotonic_ns()
        job.start()
        return began, HOSTS
    other = max(line for line in ranks.values() if line[3] != zero)
    began = time.monotonic_ns()
    if event == "worker":
        os.kill(other[2], signal.SIGKILL)
        return began, HOSTS
    job.hosts[other[3]].kill()
    return began, HOSTS - 1


def measure(library, event, options, etcd):
    """Seconds of each round, and what became of those that have none."""
    took, lost = [], []
    before = LEAST_HOSTS if event == "join" else HOSTS
    while len(took) + len(lost) < options.rounds:
        with Job(library, options, etcd) as job:
            ranks = None
            try:
                ranks = job.settle(before, None)
            except NotSurvivedError as why:
                for log in pathlib.Path(job.folder).glob("*.log"):
                    sys.stderr.write(log.read_text(errors="replace")[-2000:])
                sys.exit(f"restarts: {library} did not begin its job: {why}")
            while len(took) + len(lost) < options.rounds:
                began, hosts = happen(job, event, ranks)
                try:
                    ranks = job.wait(hosts, began)
                except NotSurvivedError as why:
                    lost.append(str(why))
                    break
                took.append((max(line[0] for line in ranks.values()) - began) / 1e9)
                if event == "launcher":
                    for mark in [m for m, each in job.hosts.items() if each.poll() is not None]:
                        job.end(mark)
                try:
                    ranks = job.settle(before, ranks)
                except NotSurvivedError:
                    break  # begin the next round with another job
    return took, lost


def row_of(library, event, took, lost):
    figures = (
        [f"{value:.2f}" for value in (statistics.median(took), min(took), max(took))]
        if took
        else ["-"] * 3
    )
    said = ", ".join(f"{lost.count(why)} x {why}" for why in sorted(set(lost)))
    return "{:9} {:11} {:>7} {:>7} {:>7}  {}".format(event, library, *figures, said).rstrip()


def parse():
    about, text = (argparse.RawDescriptionHelpFormatter, __doc__)
    parser = argparse.ArgumentParser(description=text, formatter_class=about)
    parser.add_argument("--rounds", type=int, default=5, help="of each event")
    parser.add_argument("--libraries", type=words_of(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--events", type=words_of(EVENTS), default=list(EVENTS))
    parser.add_argument(
        "--keep-alive", type=int, help="seconds after which a silent host of muster's is lost"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds to wait for a round")
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="folder of the build")
    parser.add_argument("--gate", action="store_true", help="exit with 1 where muster needs 3 s")
    parser.add_argument("--json", help="a file to which rows are added")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("at least one round")
    return options


def main():
    options = parse()
    if options.work:
        return work(*options.work)
    if shutil.which("etcd") is None:
        sys.exit("restarts: etcd is not installed: apt-get install etcd-server")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{HOSTS} hosts x {WORKERS} workers, {os.cpu_count()} cores; s from event to first step")
    print("muster: etcd; torchrun: c10d; both with the default last_call_timeout of 30 s")
    if options.keep_alive:
        print(f"muster: a host is lost after {options.keep_alive} s of silence")
    print("worker: Python with torch; muster-c++: muster_bench_restarts")
    print("event     library      median   least    most", flush=True)
    kept = True
    with Etcd() as etcd:
        for event in options.events:
            for library in options.libraries:
                took, lost = measure(library, event, options, etcd)
                print(row_of(library, event, took, lost), flush=True)
                if options.json:
                    row = {"event": event, "library": library, "s": took, "lost": lost}
                    with open(options.json, "a") as rows:
                        rows.write(json.dumps(row) + "\n")
                if library != "torchrun":
                    median = statistics.median(took + [math.inf] * len(lost))
                    kept = kept and median < PROMISED_S
    return 1 if options.gate and not kept else 0


if __name__ == "__main__":
    sys.exit(main())
