#!/usr/bin/env python3
"""Times collectives between hosts against what their links allow: `muster bench hosts`.

The hosts are network namespaces of this machine, each on a switch by links of the given rate, one
or several (veth pairs, a bridge, tc's token bucket on what a host sends; TCP with cubic). muster,
with TLS as it is by default, and those of stock torch's Gloo and Open MPI that are here take turns.
Needs root and iproute2; whatever was made is removed at the end, after Ctrl-C too.

The limit of a cell is what a host must send, divided by the rate of all its links. With B the bytes
of the cell, H hosts and R ranks on each:

    all_reduce       2 (H - 1) / H x B
    reduce_scatter   (H - 1) / H x B            B is what each rank gives
    all_gather       (H - 1) / H x B            B is what each rank receives in all
    broadcast        B
    all_to_all       R (H - 1) / H x B          B is what each rank gives, and receives, in all

It counts payload alone: headers take 4.6 % of a wire with an MTU of 1500, so nothing large is below
1.05, while the bucket lets 256 KiB pass at once, so 1 MiB may be. Shown are microseconds of one
call after a barrier, from the last rank's start to the last rank's end, the median over the rounds
of the median of calls; then times the limit. The orders and answers are those of
src/muster/cli/bench/cell.h.
"""

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
BURST = "256kb"
CONGESTION = "cubic"
DEVICES = ("wire0", "wire1", "wire2", "wire3")
LIBRARIES = ("muster", "gloo", "openmpi")
#: What a host must send, in parts of a cell's bytes, on so many hosts of so many ranks.
SENT = {
    "all_reduce": lambda hosts, _: 2 * (hosts - 1) / hosts,
    "reduce_scatter": lambda hosts, _: (hosts - 1) / hosts,
    "all_gather": lambda hosts, _: (hosts - 1) / hosts,
    "broadcast": lambda *_: 1,
    "all_to_all": lambda hosts, ranks: ranks * (hosts - 1) / hosts,
}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def limit_us(op, size, hosts, ranks_per_host, rate):
    """Microseconds that a host's link needs, at `rate` bits a second, for what the host must send
    in a call of `size` bytes.
    """
    return SENT[op](hosts, ranks_per_host) * size * 8 / rate * 1e6


def number_with(units, what):
    def read(text):
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        with contextlib.suppress(KeyError, ValueError):
            return float(digits) * units[text[len(digits) :]]
        raise argparse.ArgumentTypeError(
            f'"{text}" is no {what}: a number and one of {", ".join(filter(None, units))}'
        )

    return read


class Hosts:
    """Network namespaces, one a host, and one more with a bridge per link; gone at the end."""

    def __init__(self, count, rate, links=1):
        stem = f"muster{os.getpid()}"
        self.names = [f"{stem}h{host}" for host in range(count)]
        self.switch = f"{stem}s"
        self.addresses = [f"10.213.0.{host + 1}" for host in range(count)]
        self.rate = rate
        self.devices = DEVICES[:links]

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_):
        self.remove()

    def make(self):
        for name in (*self.names, self.switch):
            command("ip netns add", name)
        for name in self.names:
            command("ip -n", name, "link set lo up")
            # Linux's own default, whatever this machine has.
            inside = ["ip", "netns", "exec", name, "sysctl", "-q"]
            command(*inside, f"net.ipv4.tcp_congestion_control={CONGESTION}")
        for link, device in enumerate(self.devices):
            bridge = f"bridge{link}"
            command("ip -n", self.switch, "link add", bridge, "type bridge")
            command("ip -n", self.switch, "link set", bridge, "up")
            for host in range(len(self.names)):
                self.connect(host, device, f"port{link}-{host}", bridge, f"10.213.{link}")

    def connect(self, host, device, port, bridge, network):
        name = self.names[host]
        command("ip link add", device, "netns", name, "type veth peer", port, "netns", self.switch)
        command("ip -n", self.switch, "link set", port, "master", bridge, "up")
        command("ip -n", name, f"address add {network}.{host + 1}/24 dev", device)
        command("ip -n", name, "link set", device, "up")
        bucket = f"tbf rate {self.rate:.0f} burst {BURST} latency 50ms"
        command("tc -n", name, "qdisc add dev", device, "root", bucket)

    def remove(self):
        # No second Ctrl-C leaves half of it behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in (*self.names, self.switch):
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in inside.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)
        signal.signal(signal.SIGINT, before)

    def inside(self, host):
        """What stands before a command that is to run on a host, which has a name of its own: Open
        MPI knows hosts by their names.
        """
        name = self.names[host]
        return [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {name}; exec "$@"',
            "sh",
        ]


def command(*words):
    words = [part for word in words for part in word.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"muster bench hosts: {' '.join(words)} has failed: {done.stderr.strip()}")


class Contestant:
    """A library's ranks on the hosts, which wait for orders. Processes end with it."""

    def __init__(self, library, hosts, options, folder):
        self.library = library
        self.folder = pathlib.Path(folder) / library
        self.folder.mkdir()
        self.processes = []
        self.unread = ""
        self.ranks = len(hosts.names) * options.ranks_per_host
        self.back = self.pipe("back")
        self.orders = [self.pipe(f"to-{rank}") for rank in range(self.ranks)]
        for words in getattr(self, library)(hosts, options):
            self.start(words)

    def pipe(self, name):
        """Open at both ends here: no side waits for the other to open it."""
        os.mkfifo(self.folder / name, 0o600)
        return os.open(self.folder / name, os.O_RDWR)

    def start(self, words):
        with open(self.folder / "log", "a", encoding="utf-8") as log:
            self.processes.append(
                subprocess.Popen(
                    [str(word) for word in words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def on_each(self, hosts, options, words):
        for rank in range(self.ranks):
            yield [
                *hosts.inside(rank // options.ranks_per_host),
                *words,
                "--rank",
                rank,
                "--ranks",
                self.ranks,
                "--folder",
                self.folder,
            ]

    def muster(self, hosts, options):
        secret = f"MUSTER_SECRET={secrets.token_hex(32)}"
        words = ["env", secret, f"MUSTER_SOCKET_IFNAME={','.join(hosts.devices)}", options.worker]
        return self.on_each(hosts, options, words)

    def gloo(self, hosts, options):
        words = [
            "env",
            f"GLOO_SOCKET_IFNAME={','.join(hosts.devices)}",
            sys.executable,
            HERE / "gloo_worker.py",
        ]
        return self.on_each(hosts, options, words)

    def openmpi(self, hosts, options):
        program = self.folder / "mpi_worker"
        command("mpicc.openmpi -O2 -o", str(program), str(HERE / "mpi_worker.c"))
        # What Open MPI starts on another host, by ssh elsewhere: host and command are its words.
        agent = self.folder / "agent"
        lines = [
            f'{address}) set -- {shlex.join(hosts.inside(host))} sh -c "$*" ;;'
            for host, address in enumerate(hosts.addresses)
        ]
        agent.write_text(
            "#!/bin/sh\nhost=$1; shift\ncase $host in\n" + "\n".join(lines) + '\nesac\nexec "$@"\n',
            encoding="utf-8",
        )
        agent.chmod(0o700)
        places = ",".join(f"{address}:{options.ranks_per_host}" for address in hosts.addresses)
        words = [
            "mpirun.openmpi",
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
            "--host",
            places,
            "-n",
            self.ranks,
        ]
        for name, value in (
            ("plm_rsh_agent", agent),
            ("pml", "ob1"),
            ("btl", "tcp,vader,self"),
            ("btl_tcp_if_include", ",".join(hosts.devices)),
            ("oob_tcp_if_include", hosts.devices[0]),
            ("mpi_yield_when_idle", 1),
        ):
            words += ["--mca", name, value]
        return [[*hosts.inside(0), *words, program, self.folder]]

    def play(self, op, size, seconds):
        """Microseconds, or None where there is no such figure; then self.why says why."""
        for order in self.orders:
            os.write(order, f"cell {op} {size} float32 private {seconds} 0\n".encode())
        limit = time.monotonic() + 120 + 60 * seconds
        while "\n" not in self.unread:
            if any(process.poll() for process in self.processes):
                return self.fail("its ranks have ended")
            if time.monotonic() > limit:
                return self.fail("it did not answer in time")
            if select.select([self.back], [], [], 0.2)[0]:
                self.unread += os.read(self.back, 4096).decode()
        line, self.unread = self.unread.split("\n", 1)
        kind, *words = line.split()
        if kind == "row":
            return float(words[1])
        if kind == "skip":
            return None
        return self.fail(" ".join(words))

    def fail(self, why):
        log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        print(
            f"{self.library}: {why}; it said: {log[-1500:].strip() or 'nothing'}", file=sys.stderr
        )
        self.end()
        return None

    @property
    def ended(self):
        return not self.processes

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes = []


def those_here(asked):
    """The libraries that can run; says of each other one what it lacks."""
    lacks = {
        "openmpi": None
        if shutil.which("mpicc.openmpi")
        else "apt-get install openmpi-bin libopenmpi-dev",
    }
    for library in asked:
        if lacks.get(library):
            print(f"{library} is left out: {lacks[library]}", file=sys.stderr)
        else:
            yield library


def measure(options, hosts, folder):
    """A row of each cell and library; each is printed as soon as it is there."""
    contestants = []
    rows = []
    try:
        contestants += (Contestant(name, hosts, options, folder) for name in options.libraries)
        shape = f"{options.hosts}x{options.ranks_per_host}"
        print(
            f"{'':28}{'limit us':>12}"
            + "".join(f"{library + ' us':>14}{'x limit':>9}" for library in options.libraries),
            flush=True,
        )
        for op in options.op:
            for text, size in options.sizes.items():
                found = {contestant.library: [] for contestant in contestants}
                for _ in range(options.rounds):
                    for contestant in contestants:
                        us = (
                            None if contestant.ended else contestant.play(op, size, options.seconds)
                        )
                        found[contestant.library] += [] if us is None else [us]
                limit = limit_us(
                    op,
                    size,
                    options.hosts,
                    options.ranks_per_host,
                    options.rate * options.links,
                )
                line = f"{op:16}{text:>8} {shape:3}{limit:12.0f}"
                for library, times in found.items():
                    if not times:
                        line += f"{'-':>14}{'-':>9}"
                        continue
                    us = statistics.median(times)
                    line += f"{us:14.0f}{us / limit:9.2f}"
                    rows.append(
                        {
                            "bench": "hosts",
                            "library": library,
                            "op": op,
                            "bytes": size,
                            "hosts": options.hosts,
                            "ranks_per_host": options.ranks_per_host,
                            "rate": options.rate,
                            "links": options.links,
                            "us": us,
                            "limit_us": limit,
                        }
                    )
                print(line, flush=True)
    finally:
        for contestant in contestants:
            contestant.end()
    return rows


def read_options(words):
    parser = argparse.ArgumentParser(
        prog="muster bench hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--hosts", type=int, default=2, help="default 2, at most 200")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default 1")
    parser.add_argument(
        "--rate",
        type=number_with(UNITS, "rate"),
        default="1gbit",
        help="of each host's link, as tc writes it; default 1gbit",
    )
    parser.add_argument(
        "--links", type=int, default=1, help="of each host, each of the rate; default 1, at most 4"
    )
    parser.add_argument(
        "--op",
        **listed,
        default=list(SENT),
        help="operations, comma separated; default: those above",
    )
    size_of = number_with(SIZES, "size")
    parser.add_argument(
        "--sizes",
        type=lambda text: {word: int(size_of(word)) for word in text.split(",")},
        default="1MiB,16MiB",
        help="bytes, comma separated; default 1MiB,16MiB",
    )
    parser.add_argument(
        "--libraries",
        **listed,
        default=list(LIBRARIES),
        help="comma separated; default muster,gloo,openmpi",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of the loops of one cell; default 0.5"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often everything is repeated; default 3"
    )
    parser.add_argument("--json", help="also append the rows to this file, one JSON object a line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    for given, known in ((options.op, SENT), (options.libraries, LIBRARIES)):
        for word in given:
            if word not in known:
                parser.error(f'"{word}" is none of {", ".join(known)}')
    if not 2 <= options.hosts <= 200 or options.ranks_per_host < 1 or options.rounds < 1:
        parser.error("there are 2 to 200 hosts, at least one rank on each and at least one round")
    if not 1 <= options.links <= len(DEVICES):
        parser.error(f"a host has 1 to {len(DEVICES)} links")
    return options


def main(words):
    options = read_options(words)
    if os.geteuid() != 0:
        sys.exit(
            "muster bench hosts: making network namespaces needs root: sudo muster bench hosts"
        )
    for program in ("ip", "tc"):
        if not shutil.which(program):
            sys.exit(f"muster bench hosts: there is no {program}: apt-get install iproute2")
    if not pathlib.Path(options.worker or "").is_file():
        sys.exit(
            f"muster bench hosts: {options.worker} is not there; it is built with the half of "
            "muster that needs torch (make build)"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.libraries = list(those_here(options.libraries))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="muster-hosts-") as folder,
            Hosts(options.hosts, options.rate, options.links) as hosts,
        ):
            rows = measure(options, hosts, folder)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    cells = len(options.op) * len(options.sizes)
    return 0 if sum(row["library"] == "muster" for row in rows) == cells else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
