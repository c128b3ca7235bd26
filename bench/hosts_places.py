# SPDX-License-Identifier: BSD-3-Clause
"""The hosts of `muster-lab hosts`: network namespaces of this machine, or machines by name.

Each kind is a context manager and has

    names, addresses   of the hosts; Open MPI and the store reach them by address
    devices            the network interfaces to use; none: the libraries choose
    one_clock          whether all hosts read the same clock
    pinned             whether each host has cores of its own by --pin
    kind               what rows call this kind
    on(host, words, library)   the command that runs `words` there, started here
    dedicated(ranks)           whether so many ranks of a host have a core each
    place(program)             makes a program that was built here be there; its path
    launcher(words)            what runs mpirun
    agent(folder)              what mpirun runs to reach a host: its words are host and command
    end(library)               ends those of its ranks that run on without what was started here
    remark()                   what a reader of the table must know of this kind
"""

import argparse
import contextlib
import os
import pathlib
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time

#: KiB that pass at once; below 100 Mbit/s less, or links that are idle at times were faster.
BURST, LEAST_BURST = 256, 32
CONGESTION = "cubic"
DEVICES = ("wire0", "wire1", "wire2", "wire3")
#: Seconds until a host that does not answer counts as one that cannot be reached.
PATIENCE = 30
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def command(*words):
    words = [part for word in words for part in word.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"muster-lab hosts: {' '.join(words)} has failed: {done.stderr.strip()}")


@contextlib.contextmanager
def undisturbed():
    """No second Ctrl-C or SIGTERM leaves half of it behind."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def burst_kib(rate):
    return max(LEAST_BURST, min(BURST, int(BURST * rate / 1e8)))


def divided(cores, hosts):
    """Equally many cores for each host; nothing if hosts outnumber cores."""
    part = len(cores) // hosts
    return [cores[host * part : (host + 1) * part] for host in range(hosts)] if part else []


class Hosts:
    """Network namespaces, one a host, and one more with a bridge per link; gone at the end.

    round_trip_ms is what links add to the way there and back, by delay_relay.py in the bridge's
    place.
    """

    kind = "namespaces"
    one_clock = True

    def __init__(self, count, rate, links=1, pin=False, round_trip_ms=0):
        stem = f"muster{os.getpid()}"
        self.names = [f"{stem}h{host}" for host in range(count)]
        self.switch = f"{stem}s"
        self.addresses = [f"10.213.0.{host + 1}" for host in range(count)]
        self.rate = rate
        self.devices = DEVICES[:links]
        self.cores = divided(sorted(os.sched_getaffinity(0)), count) if pin else []
        self.pinned = bool(self.cores)
        self.congestion = CONGESTION
        self.round_trip_ms = round_trip_ms
        self.relays = []

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
            self.choose_congestion(name)
        for link, device in enumerate(self.devices):
            ports = [f"port{link}-{host}" for host in range(len(self.names))]
            for host, port in enumerate(ports):
                self.connect(host, device, port, f"10.213.{link}")
            if self.round_trip_ms:
                self.relay(ports)
            else:
                self.bridge(f"bridge{link}", ports)

    def choose_congestion(self, name):
        """Linux's own default, whatever this machine has; or what the host has, where the machine
        lets namespaces choose among others only.
        """
        key = "net.ipv4.tcp_congestion_control"
        inside = ["ip", "netns", "exec", name, "sysctl"]
        words = [*inside, "-q", f"{key}={CONGESTION}"]
        if subprocess.run(words, capture_output=True, check=False).returncode != 0:
            found = subprocess.run([*inside, "-n", key], capture_output=True, text=True, check=True)
            self.congestion = found.stdout.strip()

    def bridge(self, bridge, ports):
        command("ip -n", self.switch, "link add", bridge, "type bridge")
        command("ip -n", self.switch, "link set", bridge, "up")
        for port in ports:
            command("ip -n", self.switch, "link set", port, "master", bridge)

    def relay(self, ports):
        script = pathlib.Path(__file__).with_name("delay_relay.py")
        words = ["ip", "netns", "exec", self.switch, sys.executable, "-S", script]
        words += ["--delay-ms", str(self.round_trip_ms / 2), *ports]
        relay = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        self.relays.append(relay)
        if not relay.stdout.readline():  # it says when it listens
            sys.exit(f"muster-lab hosts: {script.name} has ended with {relay.wait()}")

    def connect(self, host, device, port, network):
        name = self.names[host]
        command("ip link add", device, "netns", name, "type veth peer", port, "netns", self.switch)
        command("ip -n", self.switch, "link set", port, "up")
        command("ip -n", name, f"address add {network}.{host + 1}/24 dev", device)
        command("ip -n", name, "link set", device, "up")
        # Limits both directions: the host's device, and the switch's port to it.
        bucket = f"root tbf rate {self.rate:.0f} burst {burst_kib(self.rate)}kb latency 50ms"
        command("tc -n", name, "qdisc add dev", device, bucket)
        command("tc -n", self.switch, "qdisc add dev", port, bucket)

    @undisturbed()
    def remove(self):
        for name in (*self.names, self.switch):
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in inside.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)
        for relay in self.relays:
            relay.kill()
            relay.wait()
            relay.stdout.close()

    def inside(self, host):
        """The words before a command that is to run on a host, which has a name of its own: Open
        MPI knows hosts by their names.
        """
        name = self.names[host]
        cores = ["taskset", "-c", ",".join(map(str, self.cores[host]))] if self.cores else []
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", name, *cores, *named]

    def on(self, host, words, _library):
        return [*self.inside(host), *words]

    def dedicated(self, ranks):
        return self.pinned and ranks <= len(self.cores[0])

    def place(self, program):
        return program

    def launcher(self, words):
        options = ["--mca", "oob_tcp_if_include", self.devices[0], "--bind-to", "none"]
        return [*self.inside(0), words[0], *options, *words[1:]]

    def agent(self, folder):
        lines = [
            f'{address}) set -- {shlex.join(self.inside(host))} sh -c "$*" ;;'
            for host, address in enumerate(self.addresses)
        ]
        path = folder / "agent"
        path.write_text(
            "#!/bin/sh\nhost=$1; shift\ncase $host in\n" + "\n".join(lines) + '\nesac\nexec "$@"\n',
            encoding="utf-8",
        )
        path.chmod(0o700)
        return str(path)

    def end(self, _library):
        """Nothing does before `remove`."""

    def remark(self):
        """How the hosts share this machine's cores, and how unlike others they send."""
        unlike = ""
        if self.congestion != CONGESTION:
            unlike = f"; TCP by {self.congestion}: no namespace here may choose {CONGESTION}"
        return self.sharing() + unlike

    def sharing(self):
        count, cores = len(self.names), len(os.sched_getaffinity(0))
        if self.pinned:
            numbers = ["+".join(map(str, own)) for own in self.cores]
            return f"each host has cores of its own: {', '.join(numbers)}"
        advice = "; --pin gives each its own" if cores >= count else ""
        return f"{count} hosts share {cores} cores{advice}"


class ListedHosts:
    """Machines by name, reached by a remote shell. Programs started there are ended at the end."""

    kind = "list"
    one_clock = False
    pinned = False

    def __init__(self, names, shell, devices, program):
        self.names = self.addresses = names
        self.shell = shlex.split(shell)
        self.devices = devices
        self.program = program
        token = secrets.token_hex(8)
        # Begins a variable of every rank's environment; the library's name ends it.
        self.mark = f"MUSTER_BENCH_RUN={token}-"
        self.folder = f"/tmp/muster-hosts-{token}"

    def __enter__(self):
        here = shlex.quote(self.program)
        complaint = shlex.quote(f"{self.program} is not there; it has the same path on all hosts")
        self.demand_on_all(f"[ -x {here} ] || {{ echo {complaint}; exit 1; }}")
        return self

    def __exit__(self, *_):
        self.end("", f"rm -rf {self.folder}")

    @undisturbed()
    def end(self, library, last=":"):
        """Ends the ranks of a library, or of all: a rank in a call does not see that the remote
        shell that started it is gone.
        """
        marked = f'grep -qsa {self.mark}{library} "$process/environ"'
        kill = f'{marked} && kill -9 "${{process#/proc/}}"'
        for fault in self.run_on_all(f"for process in /proc/[0-9]*; do {kill}; done; {last}"):
            print(f"muster-lab hosts: ranks may still run: {fault}", file=sys.stderr)

    def demand_on_all(self, script, given=b""):
        if faults := self.run_on_all(script, given):
            sys.exit("\n".join(f"muster-lab hosts: {fault}" for fault in faults))

    def run_on_all(self, script, given=b""):
        """Runs it on all hosts at once; a sentence for each host on which it has failed."""
        runs = []
        faults = []
        try:
            for host in range(len(self.names)):
                runs.append(
                    subprocess.Popen(
                        self.reach(host, ["sh", "-c", script]),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # no terminal: nothing asks for a password
                    )
                )
            limit = time.monotonic() + PATIENCE
            for name, run in zip(self.names, runs, strict=True):
                what = f"host {name}: {shlex.join([*self.shell, name])}"
                faults += fault_of(what, run, given, limit)
        finally:
            for run in runs:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
        return faults

    def reach(self, host, words):
        return [*self.shell, self.names[host], shlex.join(map(str, words))]

    def on(self, host, words, library):
        mark = self.mark + library
        return self.reach(host, ["env", mark, *variables(os.environ), *words])

    def dedicated(self, _ranks):
        return True  # Open MPI refuses more ranks than cores

    def place(self, program):
        path = f"{self.folder}/{program.name}"
        fill = f"umask 077; mkdir -p {self.folder} && cat > {path} && chmod 700 {path}"
        self.demand_on_all(fill, program.read_bytes())
        return path

    def launcher(self, words):
        return [words[0], "-x", f"{self.mark}openmpi", *words[1:]]

    def agent(self, _folder):
        return shlex.join(self.shell)

    def remark(self):
        return "each host reads its own clock: a call lasts as long as on its slowest rank"


def fault_of(what, run, given, limit):
    try:
        said, _ = run.communicate(given, timeout=max(0, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        yield f"{what} has not answered within {PATIENCE} s"
        return
    if run.returncode != 0:
        text = said.decode(errors="replace").strip() or "nothing"
        yield f"{what} has ended with status {run.returncode}; it said: {text}"


def variables(environment):
    """Variables that a remote shell does not carry along: settings and places of libraries."""
    for name, value in environment.items():
        ours = name.startswith(("MUSTER_", "GLOO_"))
        secret = name.startswith(("MUSTER_SECRET", "MUSTER_ETCD_"))
        if (ours and not secret) or name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
            yield f"{name}={value}"


def names_of(text):
    """Hosts from a comma-separated list, or from a file with one a line and comments after #."""
    if os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            lines = [line.split("#")[0].strip() for line in file]
        names = [line for line in lines if line]
    else:
        names = text.split(",")
    for name in names:
        if not NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f'"{name}" is no name of a host')
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            "a host is listed twice; --ranks-per-host says how many ranks each has"
        )
    return names
